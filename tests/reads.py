"""Finds where the host would wait for its device, on a machine without a GPU."""

from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "index.Tensor")


class Reads(TorchDispatchMode):
    """Records the operations whose result the host would wait for if the tensors were on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = str(function).removeprefix("aten."), kwargs or {}
        moved = name.startswith("_to_copy") and kwargs.get("device") is not None and not kwargs.get("non_blocking")
        if moved and kwargs.get("dtype") in (None, args[0].dtype):
            self.names.append(name)
        if name.split(".")[0] in READS or name in READS:
            self.names.append(name)
        return function(*args, **kwargs)


def noting(train_step: Callable, found: list[list[str]]) -> Callable:
    """Wraps `train_step` to append to `found` the names of the operations for which each step waits."""

    def watched(*arguments):
        with Reads() as reads:
            step = train_step(*arguments)
        found.append(reads.names)
        return step

    return watched
