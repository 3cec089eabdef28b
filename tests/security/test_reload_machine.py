"""Certificates and keys that are replaced while they are in use, in any order: complete, partly, by garbage, not at
all. The identity shown to the next connection always was on disk as a whole, and is the present one once that is
consistent."""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import ssl
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.local.certs import make_certs
from cluster.errors import UnauthenticatedError
from cluster.security.identity import CHECK_SECONDS, Identity, Pem
from cluster.security.key_file import ApiKeys
from cluster.security.keys import KeyEntry, new_key
from cluster.security.tls import ListenerContext

FILES = ("router.pem", "router.key", "ca.pem")
WHICH = st.integers(0, 2)


class Certificates(RuleBasedStateMachine):
    def __init__(self, contents: list[list[bytes]]) -> None:
        super().__init__()
        self.contents = contents
        self.now = 0.0
        self.live = Path(tempfile.mkdtemp())
        self.written = 0
        self.disk: list[bytes | None] = [None, None, None]
        for number in range(3):
            self.put(number, self.contents[0][number])
        cert, key, authority = (self.live / name for name in FILES)
        self.identity = Identity(cert, key, authority, clock=lambda: self.now)
        self.listener = ListenerContext(self.identity, ask_clients=False)
        self.shown = self.identity.current()
        self.whole = {self.as_pem(one) for one in self.contents[:1]}

    def put(self, number: int, content: bytes | None) -> None:
        """As a rotation does it: another file under the same name."""
        self.disk[number] = content
        file = self.live / FILES[number]
        if content is None:
            file.unlink(missing_ok=True)
            return
        part = file.with_suffix(".part")
        part.write_bytes(content)
        self.written += 1  # the clock of files is coarse: two changes within a tick of it are one
        os.utime(part, ns=(self.written, self.written))
        part.replace(file)

    def as_pem(self, files: list[Any]) -> Pem:
        return Pem(*files)

    def fits(self) -> bool:
        """Of one pair of certificate and key, beside any authority."""
        pairs = [files[:2] for files in self.contents]
        return self.disk[:2] in pairs and self.disk[2] in [files[2] for files in self.contents]

    @rule(number=WHICH, source=WHICH)
    def one_file_changes(self, number: int, source: int) -> None:
        self.put(number, self.contents[source][number])
        self.note()

    @rule(source=WHICH)
    def all_change(self, source: int) -> None:
        for number in range(3):
            self.put(number, self.contents[source][number])
        self.note()

    @rule(number=WHICH, rubbish=st.sampled_from([b"", b"not a certificate", None]))
    def one_file_breaks(self, number: int, rubbish: bytes | None) -> None:
        self.put(number, rubbish)

    def note(self) -> None:
        if self.fits():
            self.whole.add(self.as_pem(self.disk))

    @rule(seconds=st.sampled_from([CHECK_SECONDS / 8, CHECK_SECONDS]))  # sums of these are exact
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        version = self.identity.version
        before, self.shown = self.shown, self.identity.current()
        assert (self.identity.version > version) == (before is not self.shown)
        if seconds >= CHECK_SECONDS and self.fits():
            assert self.shown == self.as_pem(self.disk), "what is on disk fits, and is not taken up"
            self.listener.refresh()
            assert handshake(self.listener.context) == first_certificate(self.shown.cert)

    @rule()
    def a_client_comes(self) -> None:
        """Through the HTTP listener, which may have seen a newer whole than `identity` has."""
        self.listener.refresh()
        self.shown = self.identity.current()
        assert handshake(self.listener.context) in {first_certificate(pem.cert) for pem in self.whole}

    @invariant()
    def it_was_on_disk_as_a_whole(self) -> None:
        assert self.shown in self.whole, "a mixture, or what never was there"

    def teardown(self) -> None:
        shutil.rmtree(self.live)


def first_certificate(pem: bytes) -> bytes:
    end = "-----END CERTIFICATE-----\n"
    return ssl.PEM_cert_to_DER_cert(pem.decode().split(end)[0] + end)


def handshake(context: ssl.SSLContext) -> bytes:
    """The certificate that a client of this context is shown."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [asking.wrap_bio(down, up), context.wrap_bio(up, down, server_side=True)]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    der = ends[0].getpeercert(binary_form=True)
    assert der is not None
    return der


NOW = 1_700_000_000.0


class Keys(RuleBasedStateMachine):
    """The file of API keys: admitted are the keys of the last good file, at this time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.file = Path(tempfile.mkdtemp()) / "keys.yaml"
        self.entries: dict[str, KeyEntry] = {}  # by key, as on disk
        self.good: dict[str, KeyEntry] = {}  # as last taken up
        self.sound = True
        self.written = 0
        self.all_keys: list[str] = []
        self.write()
        self.keys = ApiKeys(self.file, clock=lambda: self.now)

    def write(self) -> None:
        rows = [entry.model_dump(mode="json", exclude_defaults=True) for entry in self.entries.values()]
        part = self.file.with_suffix(".part")
        part.write_text(yaml.safe_dump(rows))
        self.written += 1
        os.utime(part, ns=(self.written, self.written))
        part.replace(self.file)
        self.sound = True

    @rule(dispatcher=st.sampled_from([None, 10, 1000]))
    def a_key_is_made(self, dispatcher: int | None) -> None:
        if len(self.all_keys) < 6:
            end = (
                None
                if dispatcher is None
                else datetime.datetime.fromtimestamp(self.now + dispatcher, datetime.UTC)
            )
            key, entry = new_key(f"t{len(self.all_keys)}", expires_at=end)
            self.entries[key] = entry
            self.all_keys.append(key)
            self.write()

    @rule(pick=WHICH, how=st.sampled_from(["revoked", "removed", "back"]))
    def a_key_changes(self, pick: int, how: str) -> None:
        if not self.all_keys:
            return
        key = self.all_keys[pick % len(self.all_keys)]
        if how == "removed":
            self.entries.pop(key, None)
        elif key in self.entries:
            self.entries[key] = self.entries[key].model_copy(update={"revoked": how == "revoked"})
        self.write()

    @rule(rubbish=st.sampled_from(["- broken: [", "5", "- {id: x}", None]))
    def the_file_breaks(self, rubbish: str | None) -> None:
        self.sound = False
        if rubbish is None:
            self.file.unlink(missing_ok=True)
        else:
            self.file.write_text(rubbish)

    @rule()
    def it_is_written_well_again(self) -> None:
        self.write()

    @rule()
    def the_router_looks(self) -> None:
        self.keys.refresh()
        if self.sound:
            self.good = dict(self.entries)

    @rule(seconds=st.sampled_from([1, 10]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def valid_keys_are_admitted(self) -> None:
        for key in self.all_keys:
            entry = self.good.get(key)
            expires = entry.expires_at if entry is not None else None
            ended = entry is None or entry.revoked
            ended = ended or (expires is not None and expires.timestamp() <= self.now)
            if ended:
                with pytest.raises(UnauthenticatedError):
                    self.keys.check(f"Bearer {key}")
            else:
                assert entry is not None and self.keys.check(f"Bearer {key}").tenant == entry.tenant

    def teardown(self) -> None:
        shutil.rmtree(self.file.parent)


HOW = settings(max_examples=20, stateful_step_count=30, deadline=None)
Keys.TestCase.settings = HOW
TestKeys = Keys.TestCase


def test_certificates_in_any_order(tmp_path, caplog):
    caplog.set_level(logging.ERROR)  # hundreds of halves are reported
    sets = [tmp_path / str(number) for number in range(3)]
    for directory in sets:
        make_certs(directory, [], 30)
    contents = [[(one / name).read_bytes() for name in FILES] for one in sets]
    run_state_machine_as_test(lambda: Certificates(contents), settings=HOW)  # type: ignore[arg-type]
