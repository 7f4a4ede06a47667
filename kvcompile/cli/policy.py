"""``kvcompile policy``: show a policy, check policy files, print the schema for editors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompile.cli.output import NEGATIVE, JsonOption, examples, print_error, print_json, print_wrapped
from kvcompile.errors import PolicyError
from kvcompile.tables import table

if TYPE_CHECKING:
    from kvcompile.planning.model_caches import ModelCaches
    from kvcompile.planning.stored_caches import PolicyCaches
    from kvcompile.policy.policy import Policy

SHOW_EXAMPLES = examples(
    "policy show", "policy show int4_per_token_head", "policy show policy.yaml --config config.json"
)
VALIDATE_EXAMPLES = examples("policy validate policy.yaml", "policy validate policy.yaml --config config.json")
SCHEMA_EXAMPLES = (
    examples("policy schema > kvquant-policy.json")
    + "\n\n\b\nThe first line of a policy file, for editors with the YAML language server:"
    + "\n  # yaml-language-server: $schema=kvquant-policy.json"
)

PolicyArgument = Annotated[
    str | None,
    typer.Argument(metavar="POLICY", help="A preset or a file.  [default: $KVQUANT_POLICY, else int8_per_token_head]"),
]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Policy files, YAML or JSON.")]
Config = Annotated[
    Path | None, typer.Option(metavar="PATH", help="A model's config.json, or its directory: apply the policy to it.")
]


def register(app: typer.Typer) -> None:
    policy = typer.Typer(help="Show and check policies.", no_args_is_help=True, rich_markup_mode=None)
    policy.command(epilog=SHOW_EXAMPLES)(show)
    policy.command(epilog=VALIDATE_EXAMPLES)(validate)
    policy.command(epilog=SCHEMA_EXAMPLES)(schema)
    app.add_typer(policy, name="policy")


def show(policy: PolicyArgument = None, config: Config = None, as_json: JsonOption = False) -> None:
    """Print a policy in full. With --config, also print the formats of every layer of a model."""
    from kvcompile.planning.stored_caches import store_caches
    from kvcompile.policy.policy import Policy

    loaded = Policy.load(policy)
    caches = store_caches(policy or "policy", loaded, _model(config)) if config is not None else None
    if as_json:
        print_json(_show_data(loaded, caches))
        return
    print(loaded.to_yaml().rstrip())
    if caches is not None:
        header = ["module", "format of keys", "of values", "bytes/token"]
        rows = [[row["module"], row["key"], row["value"], str(row["bytes_per_token"])] for row in _layers(caches)]
        print(f"\n{table(header, rows, text_columns=3)}")
        for note in caches.notes:
            print_wrapped(f"note: {note}", indent=6)


def _show_data(policy: Policy, caches: PolicyCaches | None) -> dict[str, Any]:
    data = {"policy": policy.model_dump(mode="json", exclude_none=True), "fingerprint": policy.fingerprint()}
    return data if caches is None else {**data, "layers": _layers(caches), "notes": list(caches.notes)}


def _layers(caches: PolicyCaches) -> list[dict[str, Any]]:
    """The formats of every layer, and the bytes of a token in all its KV heads, scales and zero points included."""
    return [
        {
            "module": stored.cache.module,
            "layer": stored.cache.layer,
            "key": stored.key.name,
            "value": stored.value.name,
            "bytes_per_token": stored.bytes_per_token("stored"),
        }
        for stored in caches.caches
    ]


def _model(config: Path) -> ModelCaches:
    from kvcompile.planning.config_file import read_config
    from kvcompile.planning.model_caches import read_model_caches

    fields = read_config(config)
    source_tokens = 1 if fields.get("is_encoder_decoder") else None  # formats do not depend on the number
    return read_model_caches(fields, source_tokens)


def validate(files: Files, config: Config = None, as_json: JsonOption = False) -> None:
    """Check policy files. With --config, also check that every rule decides something in a model."""
    model = _model(config) if config is not None else None
    results = [_check(file, model) for file in files]
    if as_json:
        print_json(results)
    else:
        _print_results(results)
    if not all(result["valid"] for result in results):
        raise typer.Exit(NEGATIVE)


def _check(file: Path, model: ModelCaches | None) -> dict[str, Any]:
    """The result for one file: whether it is a valid policy, its faults, and notes if it is valid."""
    from kvcompile.files.reading import MAX_TEXT, check_file
    from kvcompile.planning.errors import PlanError
    from kvcompile.planning.stored_caches import store_caches
    from kvcompile.policy.policy import Policy

    try:
        check_file(file, MAX_TEXT)
    except OSError as error:  # a mistake in the arguments (exit code 2), not the answer no (exit code 1)
        raise PolicyError(f"{file}: cannot be read: {error.strerror or error}") from None
    try:
        policy = Policy.from_file(file)
        policy.check_transforms()
        notes = store_caches(str(file), policy, model).notes if model is not None else ()
    except (PolicyError, PlanError) as error:
        return {"file": str(file), "valid": False, "faults": list(getattr(error, "faults", [str(error)])), "notes": []}
    return {"file": str(file), "valid": True, "faults": [], "notes": list(notes)}


def _print_results(results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        if result["valid"]:
            print(f"{result['file']}: valid")
        for note in result["notes"]:
            print_wrapped(f"note: {note}", indent=6)
        for fault in result["faults"]:
            print_error(fault)


def schema(as_json: JsonOption = True) -> None:
    """Print the JSON schema of policy files. The output is JSON, with or without --json."""
    from kvcompile.cli.policy_schema import policy_schema

    print_json(policy_schema())
