"""Packages of compiled steps that run without Python: AOTInductor's code, and a description of its inputs.

This room may import all other rooms except the command line and the functions that prepare a whole model.
"""
