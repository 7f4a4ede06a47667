"""The memory planner: the bytes of a KV cache, the users that fit, the time of a decode step. Nothing is run.

The modules read the config and the policies, and otherwise only do arithmetic. Each builds on the modules above it:

    units             80GiB, 4.35TB/s, 32k
    families          facts about model types that their configs omit
    config_file       a Hugging Face config.json -> its fields
    model_caches      fields -> the cache of every layer
    storage           a format -> bytes of a vector, as a sympy expression
    stored_caches     caches and a policy -> bytes of one user's cache, as an expression in the context
    parameters        fields -> numbers of parameters, as sympy expressions
    weights           parameters -> bytes in memory, and bytes that a decode step reads
    capacity          bytes and a budget -> users, tokens
    devices           names of GPUs -> bandwidths
    ranks             several GPUs -> the share of one GPU, and the data that they exchange
    decode_time       bytes and a bandwidth -> seconds of a decode step, and the context from which a policy is faster
    plan              the answer to one request, as data
    make_plan         the whole calculation for one request

``kvcompile.cli.plan`` reads the request and prints the result. This room imports files, policy, the format
pairs of passes, and the formats and layouts of kernels.
"""
