"""What a family's table of tensors says, in one dictionary. For the tests of the families."""

from jaxserve.checkpoint.source import CheckpointNames


def shapes_of(names: CheckpointNames) -> dict[str, tuple[int, ...]]:
    """Every tensor that has to be there, with its shape."""
    shapes = dict(names.unloaded)
    for sources in (names.embedding, names.head, *names.attention, *names.ffn, *names.predictions):
        for source in sources.values():
            shapes |= dict(zip(source.names, source.shapes, strict=True))
    return shapes
