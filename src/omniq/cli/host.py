"""`omniq host`: run the calls of all processes of a store, and nothing else."""

from __future__ import annotations

import asyncio
import re
import signal

from omniq.cli import output
from omniq.cli.options import Url
from omniq.errors import SettingsError
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.urls import storage_url
from omniq.text.masking import mask_url


def host(url: Url = None) -> int:
    """Run the calls of all processes of a nats:// store, and nothing else, until stopped.

    Without this command a worker does it beside its tasks, and a CPU-bound task there slows down all others.
    A second one waits until the first is gone. Stop it with SIGTERM or Ctrl-C.
    """
    settings = Settings.load(url=url)
    location = storage_url(settings)
    if not location.lower().startswith("nats:"):
        raise SettingsError(
            f"storage URL {mask_url(location)}: only a nats:// store has a host; other stores need none"
        )
    base, _, query = location.partition("?")
    options = [option for option in query.split("&") if not re.match(r"(host=|$)", option)]
    asyncio.run(_serve("?".join((base, "&".join([*options, "host=only"]))), settings))
    return 0


async def _serve(url: str, settings: Settings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with open_storage(url, settings=settings):
        output.print_line(f"hosting {mask_url(url)}")
        await stopped.wait()
