import pytest

from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.fleet import process_end


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (ConfigError("lanes: 9"), "lanes: 9", 2),
        (EngineFailedError("process 1 is gone"), "process 1 is gone", 1),
        (SystemExit(143), "stopped by SIGTERM", 143),
        (KeyboardInterrupt(), "KeyboardInterrupt: ", 130),
        (MemoryError("4 GB"), "MemoryError: 4 GB", 1),
    ],
)
def test_errors_in_words_and_exit_codes(error: BaseException, text: str, code: int) -> None:
    assert process_end.describe(error) == text
    assert process_end.exit_code_of(error) == code
