"""Formats are tried on the devices; one that fails, or whose numbers are wrong, is not offered."""

from jaxserve.fleet import computed_formats as module


def test_formats_are_those_that_give_the_rows_back(monkeypatch):
    def encode_rows(rows, name):
        if name == "fp8":
            raise NotImplementedError(name)
        return true(rows * 2 if name == "int8" else rows, name)

    assert module.computed_formats.__wrapped__() == ["float32", "bfloat16", "fp8", "int8"]
    true = module.encode_rows
    monkeypatch.setattr(module, "encode_rows", encode_rows)
    assert module.computed_formats.__wrapped__() == ["float32", "bfloat16"]
