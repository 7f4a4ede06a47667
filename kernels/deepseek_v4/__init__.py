"""The key cache of DeepSeek-V4: inserting and gathering rows of 584 bytes.

This room imports formats and lang.
"""
