"""What a message server refuses before a process of an attention worker has joined."""

from unittest.mock import Mock

import pytest

from jaxserve.link.remote.frames import Join
from jaxserve.link.remote.server import MessageServer, _DomainConnection
from jaxserve.link.session.hello import Refusal, make_hello


@pytest.mark.parametrize("own", [(), (2,), (-1, 0), (0, 0), (1, 0)])
def test_pieces_that_a_message_does_not_have_are_refused(own) -> None:
    hello = make_hello("attention", {})
    server = MessageServer("127.0.0.1:0", hello, "", Mock(), transport="pull")
    connection = _DomainConnection(server, Mock())
    with pytest.raises(Refusal, match=r"sends pieces .* of messages of 2 pieces"):
        connection._admit(Join(hello, "d0", 2, (8,), own))
