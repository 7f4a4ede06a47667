"""The memory planner: what a KV cache takes, how many users fit, how long a decode step takes. Nothing is run.

Arithmetic only, in the order in which one builds on the other:

    units             80GiB, 4.35TB/s, 32k
    config_file       a Hugging Face config.json -> its fields
    families          what the configs of a model type leave unsaid
    model_caches      fields -> the cache of every layer
    storage           bytes of a vector under a format, as sympy expressions
    stored_caches     caches and a policy -> bytes of one user's cache as an expression in the context
    parameters        fields -> parameters, bytes of weights
    capacity          bytes and a budget -> users, tokens
    decode_time       bytes and a bandwidth -> seconds of a decode step, the context from which a policy pays
    plan              all of it for one request

``kvcompile.cli.plan`` reads the request and prints the result.
"""
