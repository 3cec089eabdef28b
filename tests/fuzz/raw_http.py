"""HTTP requests as bytes."""

from __future__ import annotations

import selectors
import socket
import time


def exchange(address: tuple[str, int], payloads: list[bytes], seconds: float) -> list[bytes]:
    """Sends every payload on a connection of its own, all at once; the first bytes that came back on each."""
    answers = [b""] * len(payloads)
    with selectors.DefaultSelector() as selector:
        for index, payload in enumerate(payloads):
            sock = socket.create_connection(address, timeout=5)
            sock.sendall(payload)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, index)
        deadline = time.monotonic() + seconds
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(0.05):
                assert isinstance(key.fileobj, socket.socket)
                sock = key.fileobj
                try:
                    answers[key.data] = sock.recv(65536)
                except OSError:
                    answers[key.data] = b""
                selector.unregister(sock)
                sock.close()
        left = [key.fileobj for key in selector.get_map().values()]
        for one in left:
            assert isinstance(one, socket.socket)
            one.close()
        assert not left, "the router neither answers nor hangs up"
    return answers
