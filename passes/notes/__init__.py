"""Note the role of each node for a site, for reports, drawings and dumps.

This room imports prove, graph and the contracts. Compiled code does not depend on these notes.
"""
