"""The formats by name."""

from pathlib import Path

from eyas.errors import StoreError
from eyas.store.convert import specforge, speculators, speculators_v1
from eyas.store.convert.peer import Conventions, Sink, Source

CONVENTIONS = {one.name: one for one in (speculators_v1.CONVENTIONS, speculators.CONVENTIONS, specforge.CONVENTIONS)}


def conventions(name: str) -> Conventions:
    if name not in CONVENTIONS:
        raise StoreError(f"format {name!r}", expected=f"one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def open_source(name: str, folder: Path) -> Source:
    """Raises: StoreError where the folder isn't there or has no sample of this format."""
    tool = conventions(name).tool
    source: Source
    if name == "speculators-v1":
        source = speculators_v1.V1Source(folder)
    elif name == "speculators":
        source = speculators.SpeculatorsSource(folder)
    else:
        source = specforge.SpecForgeSource(folder)
    if not len(source):
        raise StoreError(
            f"{folder}: {'no sample' if folder.is_dir() else 'no such folder'}",
            expected=f"a folder of {tool}",
            next=f"mend the path, or name another format with --from: {', '.join(CONVENTIONS)}",
        )
    return source


def open_sink(name: str, folder: Path, compress: bool) -> Sink:
    if name == "speculators-v1":
        return speculators_v1.V1Sink(folder)
    if name == "speculators":
        return speculators.SpeculatorsSink(folder)
    return specforge.SpecForgeSink(folder, compress)
