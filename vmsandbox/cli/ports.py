"""Owns the verb that says where a guest's ports are found; and the entry of a keeper."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag, SelectorArgument

if TYPE_CHECKING:
    from rich.table import Table

    from vmsandbox.forwards import PortTable


def register(app: typer.Typer) -> None:
    """Add the verbs to the program."""
    app.command()(ports)
    app.command(hidden=True, name="_publish")(publish)


def ports(selector: SelectorArgument, as_json: JsonFlag = False) -> None:
    """Show what listens in a running guest, and where the host finds it: the same number at the
    sandbox's own address.

    Example: curl "$(vmsandbox ports last --json | jq -r '.data.ports[0].url')"
    """
    from vmsandbox.sandbox import Rooms, published_ports

    out = output.begin(as_json)
    with Rooms.open() as rooms:
        record, table = published_ports(rooms, rooms.store.resolve(selector))
    data = {"id": record.id, "address": record.endpoint.address, **table.model_dump(mode="json")}
    out.result(data, _drawn(table) if table.ports else "nothing listens")


def _drawn(table: "PortTable") -> "Table":
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    titles = ["port", "url", "process", "container", "bound"]
    titles += ["note"] if any(one.note for one in table.ports) else []
    for title in titles:
        drawn.add_column(title, no_wrap=title == "url")
    for one in table.ports:
        fields: list[Any] = [one.port, one.url, one.process, one.container, one.bound, one.note]
        drawn.add_row(*(str(field or "") for field in fields[: len(titles)]))
    return drawn


def publish(id_: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Publish a guest that nobody manages (started when one is kept)."""
    from vmsandbox.sandbox.publishing import keep_published
    from vmsandbox.store import Store

    out = output.begin(False)
    keep_published(Store().resolve(id_), out.note)
