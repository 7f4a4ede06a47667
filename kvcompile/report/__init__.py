"""Reports: which sites were rewritten or refused, and why, as data, text and a page.

This room imports policy and passes.
"""
