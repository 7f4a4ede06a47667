"""``kvcompile doctor``: whether this machine can run the backend, and on which devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcompile.cli.output import NEGATIVE, JsonOption, examples, print_json, print_wrapped
from kvcompile.compat import versions
from kvcompile.tables import table

if TYPE_CHECKING:
    from kvcompile.cli.doctor_checks import Check

EXAMPLES = examples("doctor", "doctor --try", "doctor --json")

Try = Annotated[
    bool, typer.Option("--try", help="Also compile and run a small attention on every device (up to a minute).")
]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(doctor)


def _works(checks: list[Check], name: str) -> bool:
    return any(check.name == name and check.status == "ok" for check in checks)


def doctor(try_devices: Try = False, as_json: JsonOption = False) -> None:
    """Check this installation: name what is missing, and what runs on each device. Lists the tested releases."""
    from kvcompile.cli.doctor_checks import MISSING, check_all, devices

    checks = check_all()
    found = devices() if _works(checks, "torch") else []
    if try_devices and _works(checks, "backend kvquant"):
        from kvcompile.cli.doctor_trial import try_device

        checks.extend(try_device(device.name) for device in found)
    healthy = all(check.status != MISSING for check in checks)
    if as_json:
        print_json(
            {
                "healthy": healthy,
                "checks": [vars(check) for check in checks],
                "devices": [vars(device) for device in found],
                "tested": [vars(one) for one in versions.TESTED],
            }
        )
    else:
        for check in checks:
            print_wrapped(f"{check.status:<8}{check.name:<17}{check.found}", indent=25)
            if check.remedy:
                print_wrapped(f"{'':<8}-> {check.remedy}", indent=11)
        for device in found:
            print_wrapped(f"{device.name} ({device.description}): {device.runs}", indent=4)
        print(f"\nkvcompile was tested with\n{table(versions.COLUMNS, versions.rows(), len(versions.COLUMNS))}")
    if not healthy:
        raise typer.Exit(NEGATIVE)
