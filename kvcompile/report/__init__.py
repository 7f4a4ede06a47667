"""What was rewritten and what was refused, as data, text and a page.

This room imports policy and passes.
"""
