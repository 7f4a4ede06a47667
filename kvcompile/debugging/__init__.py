"""Looking inside a compilation: stages of every graph, dumps to a folder, depyf.

This room imports report, policy and passes.
"""
