"""Compiling one Dynamo graph: the marks, the passes, Inductor, and PyTorch's caches of compiled code.

This room imports options, verification, debugging, parallel, call, report and passes.
"""
