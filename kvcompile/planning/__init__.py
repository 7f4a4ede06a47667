"""The memory planner: what a KV cache takes, how many users fit, how long a decode step takes. Nothing is run.

Arithmetic only, in the order in which one builds on the other:

    units             80GiB, 4.35TB/s, 32k
    families          what the configs of a model type leave unsaid
    config_file       a Hugging Face config.json -> its fields
    model_caches      fields -> the cache of every layer
    storage           a format -> bytes of a vector, as a sympy expression
    stored_caches     caches and a policy -> bytes of one user's cache, as an expression in the context
    parameters        fields -> numbers of parameters, as sympy expressions
    weights           parameters -> bytes in memory, and bytes that a decode step reads
    capacity          bytes and a budget -> users, tokens
    devices           names of GPUs -> bandwidths
    decode_time       bytes and a bandwidth -> seconds of a decode step, the context from which a policy pays
    plan              the answer to one request, as data
    make_plan         all of the above for one request

``kvcompile.cli.plan`` reads the request and prints the result.
"""
