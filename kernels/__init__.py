"""C++ for a CPU in float32: the same functions of tensors as in model/ops.py, in less time. Knows no model.

build.py compiles it, training.py and decoding.py give it to a model's table of functions, see model/ops.py.
"""
