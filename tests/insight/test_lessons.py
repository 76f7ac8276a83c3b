"""The lessons: every claim holds, can fail, and is in the document as the command prints it."""

import functools
import math
import re

import pytest
import torch
from commands import command

from conf.entry import REPOSITORY
from conf.scripts import Lessons
from data.tokenizer import ByteTokenizer
from insight.lessons import LESSONS, cost, heads, mask, shapes
from insight.lessons.lesson import Lesson, as_text, exponent
from model import functional
from model.attention import CausalMultiHeadAttention
from model.ops import TORCH
from scripts.lessons import SEEDED, about, page, teach
from training import checkpoint

pytestmark = pytest.mark.slow

DOCUMENT = (REPOSITORY / "docs" / "attention.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```text\n\$ python -m scripts\.lessons (\w+)\n\n(.*?)\n```", DOCUMENT, re.DOTALL))
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


@functools.cache
def measured(name: str, seed: int = 0) -> Lesson:
    torch.set_num_threads(1)
    return LESSONS[name].lesson(**({"seed": seed} if name in SEEDED else {}))


def refused(lesson: Lesson) -> list[str]:
    return [words for holds, words in lesson.claims if not holds]


# --- every claim ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LESSONS)
def test_every_claim_holds(name):
    assert len(measured(name).claims) >= 5
    assert not refused(measured(name))


@pytest.mark.parametrize("name", SEEDED)
def test_what_is_learned_does_not_depend_on_the_seed(name):
    assert not refused(measured(name, 1))
    assert measured(name, 1).numbers != measured(name).numbers


@pytest.mark.parametrize("name", [name for name in LESSONS if name not in (*SEEDED, "cost")])
def test_the_numbers_repeat_and_leave_the_random_state_alone(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert str(LESSONS[name].lesson().numbers) == str(measured(name).numbers)  # in words: NaN is not equal to itself
    assert torch.equal(torch.get_rng_state(), before)


def test_softmax_overflows_where_it_is_said_to():
    numbers = measured("softmax").numbers
    assert numbers["overflows from"] == {"float32": 89, "float16": 12, "Python": 710}
    assert math.isfinite(math.exp(709))
    weights, gradient = numbers["forms"]["naive"]["89 1 0"]
    assert [math.isnan(x) for x in weights] == [True, False, False] and all(map(math.isnan, gradient))
    for scores, (weights, _) in numbers["forms"]["stable"].items():
        expected = torch.tensor([float(score) for score in scores.split()]).softmax(-1).nan_to_num(0)
        torch.testing.assert_close(torch.tensor(weights), expected)


def test_the_right_book_is_read():
    numbers = measured("retrieval").numbers
    for loud, weights in numbers["weights"].items():
        exponentials = [math.exp(loud * matches / math.sqrt(5)) for matches in (2, 1, 0, 0, 0)]
        assert weights == pytest.approx([e / sum(exponentials) for e in exponentials])
        years = (1883, 1851, 1869, 1815, 1818)
        assert numbers["years"][loud] == pytest.approx(sum(w * year for w, year in zip(weights, years, strict=True)))


def test_scores_grow_with_the_width_unless_divided():
    numbers = measured("scaling").numbers
    assert numbers["d_k"] == [4, 16, 64, 256, 1024]
    assert numbers["variance"] == pytest.approx(numbers["d_k"], rel=0.1)
    assert numbers["variance, scaled"] == pytest.approx([1] * 5, rel=0.1)
    assert numbers["entropy"][-1] < 0.2 < 2 < min(numbers["entropy, scaled"]) < math.log(16)
    assert numbers["gradient"][-1] < 0.1 < 0.2 < min(numbers["gradient, scaled"])


def test_the_example_has_these_shapes():
    x, in_heads, square = [2, 4, 8], [2, 2, 4, 4], [2, 2, 4, 4]
    of_heads = {f"{name}, in heads": in_heads for name in "qkv"}
    expected = {"x": x, "q": x, "k": x, "v": x, **of_heads, "scores": square, "weights": square, "mixed": in_heads}
    assert measured("shapes").numbers["shapes"] == {**expected, "output": x}


@pytest.mark.parametrize(
    "arguments",
    [
        {"qk_norm": True},
        {"positions": "alibi"},
        {"positions": "learned", "n_kv_heads": 4},
        {"positions": "sinusoidal", "window": 2},
        {"positions": "none", "max_seq_len": 3},
        {"soft_cap": 5.0},
        {"d_model": 32, "pairing": "interleaved"},
    ],
    ids=str,
)
def test_the_six_steps_are_those_of_any_model(small, arguments):
    model = small(**arguments).float()
    if "soft_cap" not in arguments:
        assert model.blocks[0].attention.ops == TORCH
    lesson = shapes.lesson(model)
    assert not refused(lesson)
    d_head, g = model.config.d_model // 4, model.config.n_kv_heads
    length = min(4, model.max_seq_len)
    assert lesson.numbers["shapes"]["k, in heads"] == [2, g, length, d_head]
    assert lesson.numbers["shapes"]["weights"] == [2, 4, length, length]
    assert ("forgotten transpose" in lesson.numbers) == (length == d_head)


def test_the_triangle_and_what_training_without_it_does():
    numbers = measured("mask").numbers
    assert numbers["triangle"] == torch.ones(5, 5).tril().int().tolist()
    (honest, on_prefixes, right), (blind, blind_on_prefixes, blind_right) = numbers["trained"].values()
    assert blind < 0.3 < math.log(3) < honest < on_prefixes + 0.1 < 1.3
    assert blind_on_prefixes > math.log(12)
    assert blind_right < 0.4 < 0.9 < right


def test_heads_cost_the_same_and_grow_narrow():
    numbers = measured("heads").numbers
    d, s = heads.D_MODEL, heads.LENGTH
    assert set(numbers["flops"].values()) == {2 * (4 * s * d * d + 2 * s * s * d)}
    assert numbers["rank"] == {1: 16, 2: 8, 4: 4, 8: 2}
    assert numbers["matching loss"][8] > 0.3 > 0.05 > numbers["matching loss"][1]
    for back in numbers["looks back"][2]:
        assert 0.5 < max(back) <= sum(back) <= 1.000001


def test_positions_side_by_side():
    numbers = measured("positions").numbers
    assert {scheme: change > 1e-6 for scheme, change in numbers["reordered"].items()} == {
        "none": False, "sinusoidal": True, "learned": True, "rope": True, "alibi": True,
    }  # fmt: skip
    assert {scheme: change > 1e-6 for scheme, change in numbers["shifted"].items()} == {
        "none": False, "sinusoidal": True, "learned": True, "rope": False, "alibi": False,
    }  # fmt: skip
    assert numbers["bands"] == [[3, 16], [17, 32], [33, 48], [49, 64]]
    assert numbers["floor"] == pytest.approx(-(0.825 * math.log(0.825) + 7 * 0.025 * math.log(0.025)))
    for loss in numbers["loss"].values():
        assert (
            min(sum(loss[start:stop]) / (stop - start) for start, stop in ((2, 16), (16, 64))) > numbers["floor"] - 0.05
        )


def test_the_kernels_flag_sees_the_first_key_only():
    numbers = measured("cache").numbers
    assert numbers["flag"] == [1.0] + [0.0] * 11
    assert list(numbers["ways"].values())[:2] == pytest.approx([0, 0], abs=1e-5)
    assert min(list(numbers["ways"].values())[2:]) > 0.1


def test_what_is_kept_and_what_waits():
    numbers = measured("cost").numbers
    kept = {name: one["MiB"] for name, one in numbers["attention"].items()}
    assert kept["fused"][-1] == pytest.approx(4 * 4096 * 64 * 4 / 2**20, rel=0.05)  # q, k, v and what comes out
    assert kept["math"][-1] > 4096**2 * 4 / 2**20  # the square
    layers = numbers["layers"]
    assert layers["recurrence"]["chain"] == [16, 32, 64, 128]
    assert layers["attention"]["flops"] == [2 * (4 * n * 64 + 2 * n * n * 8) for n in (16, 32, 64, 128)]
    assert layers["convolution"]["flops"] == [2 * n * 64 * 3 for n in (16, 32, 64, 128)]
    assert [one["layers"] for one in layers.values()] == [1, 64, 1]


def test_one_word_two_vectors():
    numbers = measured("context").numbers
    assert numbers["difference"][0] == 0 < 0.01 < min(numbers["difference"][1:])
    assert numbers["told apart"][0] == 0.5 < 0.9 < numbers["told apart"][1]


# --- claims can fail ------------------------------------------------------------------------------------------------


def shifted_only(x, dim=-1):
    exp = (x - x.amax(dim, keepdim=True)).exp()
    return exp / exp.sum(dim, keepdim=True)


def naive(x, dim=-1):
    return x.exp() / x.exp().sum(dim, keepdim=True)


def untouched(x, cos, sin, pairing="half"):
    return x * torch.cat([cos, sin], dim=-1)


def sees_one_too_far(queries, T_k, device=None):
    return functional._distance(queries, T_k, device) >= -1


def sees_nothing(q, k, v, *others):
    return torch.zeros_like(q), None


def hides_nothing(padding):
    return torch.ones_like(padding)[:, None, None]


def always_two(d_model, n_heads, **others):
    return CausalMultiHeadAttention(d_model, 2, **others)


def no_bias(self, q_positions, k_positions):
    return torch.zeros(len(self.slopes), q_positions.shape[-1], k_positions.shape[-1])


def next_but_one(self, s):
    return self.lengths.unsqueeze(1) + 1 + torch.arange(s)


def all_at_once(x, w, u):
    return x.cumsum(0) @ w


QUICK = {"insight.lessons.mask.STEPS": 0, "insight.lessons.mask.T": 8}
UNTRAINED = {"insight.lessons.heads.MATCHING_STEPS": 0, "insight.lessons.heads.TWO_STEPS": 0}
UNLEARNED = {"insight.lessons.positions.STEPS": 0}
SHORT = {"insight.lessons.cost.LENGTHS": [64, 128, 256], "insight.lessons.cost.CONTEXTS": [16, 32]}
RANDOM = torch.randn
SOFTMAX = functional.softmax
SCALED = functional.scaled_dot_product_attention
# lesson, what is broken and by what, and words of the claims that must fail
FAULTS = [
    ("softmax", {"model.functional.softmax": naive}, ["with the maximum subtracted", "treated as a special case"]),
    ("softmax", {"model.functional.softmax": shifted_only}, ["treated as a special case"]),
    ("softmax", {"model.functional.softmax": lambda x, dim=-1: 2 * SOFTMAX(x)}, ["the weights sum to 1"]),
    ("softmax", {"model.functional.softmax": lambda x, dim=-1: SOFTMAX(-x)}, ["their order"]),
    ("softmax", {"model.functional.softmax": lambda x, dim=-1: SOFTMAX(x * x)}, ["adding 1000"]),
    (
        "retrieval",
        {"model.functional.scaled_dot_product_attention": lambda q, k, v: (SCALED(q, k, v)[0] * 2, SCALED(q, k, v)[1])},
        ["the result is a convex", "so it lies between"],
    ),
    (
        "retrieval",
        {"model.functional.scaled_dot_product_attention": lambda q, k, v: SCALED(-q, k, v)},
        ["for the query sea", "a longer query"],
    ),
    (
        "retrieval",
        {"model.functional.scaled_dot_product_attention": lambda q, k, v: SCALED(q, k * v / 1000, v)},
        ["another value for Treasure"],
    ),
    ("scaling", {"torch.randn": lambda *shape: 2 * RANDOM(*shape)}, ["the variance", "divided by sqrt"]),
    (
        "scaling",
        {"model.functional.softmax": lambda x: SOFTMAX(x / 100)},
        ["without the division, the entropy", "a saturated"],
    ),
    ("shapes", {"model.functional.softmax": lambda x: SOFTMAX(x, -2)}, ["the six steps", "the weights of each head"]),
    ("shapes", {"model.functional.causal_mask": sees_one_too_far}, ["everything above the diagonal"]),
    ("mask", {"model.functional.causal_mask": sees_one_too_far, **QUICK}, ["query i sees", "causal & padding"]),
    ("mask", {"TORCH.attention": mask._see_everything, **QUICK}, ["one forward"]),
    ("mask", {"model.functional.padding_mask": hides_nothing, **QUICK}, ["causal & padding", "a padded row"]),
    ("mask", {"model.functional.softmax": shifted_only, **QUICK}, ["a query that may attend"]),
    ("mask", {"model.functional.softmax": lambda x: SOFTMAX(x) / 2, **QUICK}, ["the row of every"]),
    ("mask", QUICK, ["trained without", "its text is bad", "with the mask, the training"]),
    ("heads", UNTRAINED, ["too narrow", "where two", "they specialise"]),
    ("heads", {"TORCH.attention": sees_nothing, **UNTRAINED}, ["one matrix for"]),
    ("heads", {"insight.lessons.heads.CausalMultiHeadAttention": always_two, **UNTRAINED}, ["but each is narrower"]),
    ("positions", {"TORCH.rotate": untouched, **UNLEARNED}, ["scores of RoPE and ALiBi", "within the 16"]),
    ("positions", {"model.positions.ALiBi.forward": no_bias, **UNLEARNED}, ["with any of the four"]),
    ("cache", {"model.cache.KVCache.next_slots": next_but_one}, ["fed one by one"]),
    ("cache", {"TORCH.rotate": untouched}, ["RoPE sees distances"]),
    (
        "cost",
        {
            "insight.lessons.cost.fused_attention": cost.math_attention,
            "insight.lessons.cost.recurrence": all_at_once,
            **SHORT,
        },
        ["the fused kernel", "recurrence waits", "over many products"],
    ),
    ("context", {"TORCH.attention": sees_nothing}, ["after it there are two", "each block"]),
]


@pytest.mark.parametrize(
    ("name", "changes", "words"), FAULTS, ids=[f"{i}-{fault[0]}" for i, fault in enumerate(FAULTS)]
)
def test_a_claim_that_does_not_hold_is_said_to_fail(name, changes, words, monkeypatch):
    for target, replacement in changes.items():
        if target.startswith("TORCH."):
            monkeypatch.setitem(vars(TORCH), target.removeprefix("TORCH."), replacement)
        else:
            monkeypatch.setattr(target, replacement)
    lesson = LESSONS[name].lesson()
    for beginning in words:
        assert [claim for claim in refused(lesson) if claim.startswith(beginning)], beginning
    assert not lesson.holds
    assert "\nNO   " in as_text(lesson)


@pytest.mark.parametrize("power", [0, 1, 1.5, 2])
def test_the_exponent_of_a_power_is_found(power):
    sizes = [256, 512, 1024, 4096]
    assert exponent(sizes, [3 * n**power for n in sizes]) == pytest.approx(power)


# --- what is printed ------------------------------------------------------------------------------------------------


def skeleton(text: str) -> str:
    """The text without its numbers, nor the spaces that align them."""
    return re.sub(r"[ -]+", " ", NUMBER.sub("#", text))


def numbers_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def test_the_document_has_every_lesson_in_order():
    assert list(BLOCKS) == list(LESSONS)


@pytest.mark.parametrize("name", [name for name in LESSONS if name not in (*SEEDED, "cost")])
def test_the_document_shows_what_is_printed(name):
    assert BLOCKS[name] == page(name, measured(name))


@pytest.mark.parametrize("name", SEEDED)
def test_the_document_shows_what_is_printed_by_lessons_that_train(name):
    """Other processors round differently, and training amplifies it."""
    printed = page(name, measured(name))
    assert skeleton(BLOCKS[name]) == skeleton(printed)
    assert numbers_in(BLOCKS[name]) == pytest.approx(numbers_in(printed), rel=0.3, abs=0.2)


def test_the_document_shows_what_is_printed_of_cost_but_for_the_clock():
    printed = page("cost", measured("cost"))
    assert skeleton(BLOCKS["cost"]) == skeleton(printed)
    growth, per_token, layers = BLOCKS["cost"].split("\n\n")[1:4]
    growth_now, per_token_now, layers_now = printed.split("\n\n")[1:4]
    assert layers == layers_now
    for shown, now in zip(growth.splitlines()[2:-1], growth_now.splitlines()[2:-1], strict=True):
        assert numbers_in(shown)[::2] == numbers_in(now)[::2]  # T, and the columns of MiB
    for shown, now in zip((growth, per_token), (growth_now, per_token_now), strict=True):
        powers, powers_now = (numbers_in(text.splitlines()[-1]) for text in (shown, now))
        assert powers == pytest.approx(powers_now, abs=0.6)


def test_pictures_of_the_document_are_there():
    pictures = re.findall(r"\]\(([\w.]+\.png)\)", DOCUMENT)
    assert pictures
    for picture in pictures:
        assert (REPOSITORY / "docs" / picture).is_file()


# --- the command ----------------------------------------------------------------------------------------------------


def cfg(**given) -> Lessons:
    return Lessons(**{"plot": None, "checkpoint": None, "seed": 0, **given})


def test_without_a_name_it_lists_them_a_line_each(capsys):
    assert teach(cfg(), None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(LESSONS)
    assert all(about(LESSONS[line.split()[0]]) in line for line in lines)
    assert max(map(len, lines)) <= 130


def test_a_lesson_from_the_command_line(tmp_path):
    result = command("-m", "scripts.lessons", "retrieval", f"plot={tmp_path}/books.png", cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{page('retrieval', measured('retrieval'))}\n\n{tmp_path}/books.png\n"
    assert (tmp_path / "books.png").read_bytes().startswith(b"\x89PNG")


def test_a_claim_that_fails_is_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr("model.functional.softmax", naive)
    assert not teach(cfg(), "softmax")
    assert "NO   treated as a special case" in capsys.readouterr().out


def test_all_prints_every_lesson_and_draws_each(tmp_path, monkeypatch, capsys):
    known = {name: measured(name) for name in LESSONS}
    for name, module in LESSONS.items():
        monkeypatch.setattr(module, "lesson", functools.partial(lambda name, **given: known[name], name))
    assert teach(cfg(plot=str(tmp_path / "pictures")), "all")
    out = capsys.readouterr().out
    places = [out.index(page(name, known[name])) for name in LESSONS]
    assert places == sorted(places)
    assert sorted(path.stem for path in (tmp_path / "pictures").iterdir()) == sorted(LESSONS)


def test_the_seed_is_that_of_the_training(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(heads, "lesson", lambda seed: seen.append(seed) or measured("retrieval"))
    teach(cfg(seed=4), "heads")
    assert seen == [4]


def test_the_shapes_of_a_checkpoint(small, tmp_path, capsys):
    model = small(vocab_size=257).float()
    weights, about_it = checkpoint.snapshot(model)
    about_it |= {"step": 1, "seq_len": 8, "precision": "fp32"}
    checkpoint.save(tmp_path / "step_00000001", weights, ByteTokenizer().save, about_it)
    assert teach(cfg(checkpoint=str(tmp_path / "step_00000001")), "shapes")
    assert "2 x 2 x 4 x 4" in capsys.readouterr().out  # two heads of keys and values


@pytest.mark.parametrize(
    ("action", "given", "message"),
    [
        ("mask", {"checkpoint": "runs/NAME"}, "checkpoint has an effect in the lesson shapes only, got mask"),
        ("all", {"plot": "x.png"}, "plot must be a folder for several lessons, got x.png"),
        ("mask", {"plot": "nowhere/x.png"}, "nowhere/x.png cannot be written: give plot=FILE"),
        ("mask", {"plot": "x.pdf"}, "plot must be a folder or end in .png, got x.pdf"),
        ("shapes", {"checkpoint": "nowhere"}, "there is no checkpoint at nowhere"),
    ],
)
def test_a_users_mistake_is_named(action, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        teach(cfg(**given), action)
