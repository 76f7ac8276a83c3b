"""C++ kernels for a CPU in float32: faster versions of the functions in model/ops.py. Imports nothing else of ours.

build.py compiles them; training.py and decoding.py put them into a model's table of functions, see model/ops.py.
"""
