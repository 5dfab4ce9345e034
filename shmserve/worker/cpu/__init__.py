"""The fast CPU path: C kernels that ship as source, are compiled at the first start, and run a model from its quantised blocks.

build.py compiles, library.py binds, selftest.py judges what was built, amx.py decides whether prompts are multiplied by AMX,
pack.py and loading.py bring weights into the kernels' layout, runner.py is the `ModelRunner`. Worker process only.
"""
