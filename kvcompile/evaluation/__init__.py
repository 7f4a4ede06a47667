"""The loss of quality under a policy: a model with packed caches against the same model with plain caches, on one text.

    from kvcompile.evaluation.measure import evaluate
    from kvcompile.evaluation.models import load_model
    from kvcompile.evaluation.schedule import Schedule
    from kvcompile.evaluation.text import read_text

    model = load_model("path/to/model")
    text = read_text(model, "path/to/model", Path("text.txt"), Schedule(prefill=2048, decode=256), num_windows=4)
    evaluation = evaluate(model, text, ["fp8_e4m3", "policy.yaml"])

Both models read every window in the same steps: a prefill, and then teacher-forced decode through the cache. The packed
model runs under ``torch.compile(backend="kvquant")``. ``python -m kvcompile eval`` is the command.
"""
