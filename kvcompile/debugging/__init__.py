"""Tools to look inside a compilation: the stages of every graph, dumps to a folder, depyf.

This room imports report, policy and passes.
"""
