"""Ten lessons on attention, in the order of the story: each measures its claims and takes seconds on a CPU.

A lesson is a module: its docstring's first line says what it is about, `lesson(...)` measures and returns a Lesson, and
`draw(numbers, figure)` makes a picture of what was measured.
"""

from insight.lessons import cache, context, cost, heads, mask, positions, retrieval, scaling, shapes, softmax

LESSONS = {
    "softmax": softmax,
    "retrieval": retrieval,
    "scaling": scaling,
    "shapes": shapes,
    "mask": mask,
    "heads": heads,
    "positions": positions,
    "cache": cache,
    "cost": cost,
    "context": context,
}
