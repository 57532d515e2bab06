"""The rendezvous of ranks: on one node it is closed to other machines, and received data is never executed."""

from __future__ import annotations

import io
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback

from lightning_scalerl.distributed import meeting
from lightning_scalerl.distributed.meeting import NotPlainError, decode, encode
from lightning_scalerl.distributed.ranks import LeaderFailedError, Ranks
from lightning_scalerl.rollouts.rollout import TrainBatch
from tests.axes.test_contract import batch_of
from tests.distributed.test_ranks import fit, on_ranks
from tests.examples import every, examples


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports at which this process listens."""
    sockets = {
        link for descriptor in Path("/proc/self/fd").iterdir() if (link := _target(descriptor)).startswith("socket:[")
    }
    addresses = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *other_columns = line.split()
            if state == "0A" and f"socket:[{other_columns[5]}]" in sockets:
                address, port = local.split(":")
                # The table has words of four bytes in the machine's byte order (little-endian).
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                addresses.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return addresses


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # the descriptor of the listing itself


class Listens(Callback):
    """Record during training where the process listens, without the sockets inherited from its parent."""

    def __init__(self) -> None:
        self.before = listening()
        self.at: set[str] = set()
        self.ports: set[int] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        added = listening() - self.before
        self.at |= {address for address, _ in added}
        self.ports |= {port for _, port in added}


@pytest.mark.slow
@pytest.mark.parametrize("named", every(2, [None, "localhost"], pytest.mark.full))
def test_on_one_node_nothing_listens_to_other_machines(tiny_model_path: str, tmp_path: Path, named: str | None) -> None:
    """This holds for rank 0's store and for gloo, with which all ranks listen for each other."""

    def work(rank: int) -> str:
        store = int(os.environ["MASTER_PORT"])
        del os.environ["MASTER_ADDR"]
        if named is not None:
            os.environ["MASTER_ADDR"] = named
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        listens = Listens()
        fit(tiny_model_path, tmp_path, 2, steps=2, callbacks=[listens])
        assert (store in listens.ports) == (rank == 0)
        return f"{sorted(listens.at)} {os.environ['GLOO_SOCKET_IFNAME']}"

    assert on_ranks(2, work) == ["['127.0.0.1'] lo"] * 2


@pytest.mark.slow
def test_a_user_may_name_the_interface(tiny_model_path: str, tmp_path: Path) -> None:
    def work(rank: int) -> str:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=mine0"}
        fit(tiny_model_path, tmp_path, 2, steps=1)
        return os.environ["NCCL_SOCKET_IFNAME"]

    assert on_ranks(2, work) == ["=mine0"] * 2


def reachable_address() -> str:
    """Return an address of this machine that other machines could reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # an address reserved for documentation; nothing is sent
        except OSError:
            pytest.skip("this machine has the loopback interface only")
        return str(probe.getsockname()[0])


def test_on_several_nodes_the_store_is_at_the_first_ones_address(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of one rank each, both on this machine."""
    address = reachable_address()

    def work(rank: int) -> str:
        from lightning.pytorch import Trainer

        port = int(os.environ["MASTER_PORT"])
        os.environ |= {"MASTER_ADDR": address, "LOCAL_RANK": "0", "NODE_RANK": str(rank)}
        already_listening = listening()
        settings = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "strategy": "ddp", "logger": False}
        trainer = Trainer(max_steps=1, enable_checkpointing=False, **settings)
        meeting.meet(trainer)
        assert Ranks.of(trainer).gather(rank) == [0, 1]
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        return str([address_found for address_found, at_port in listening() - already_listening if at_port == port])

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert on_ranks(2, work) == [str([address]), "[]"]


def test_a_first_node_whose_name_is_a_loopback_address_listens_on_all_addresses() -> None:
    """Debian maps a machine's own name to 127.0.1.1. Other nodes use another address, so torch must listen on all."""
    assert meeting._listening_socket("127.0.1.1", 0) is None


def test_a_port_that_is_taken_is_named_in_the_error() -> None:
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = occupant.getsockname()[1]
        with pytest.raises(dist.DistNetworkError, match=rf"cannot meet at 127\.0\.0\.1:{port}: .*in use"):
            meeting._listening_socket("127.0.0.1", port)


# --- data between ranks --------------------------------------------------------------------------------------


class Trap:
    """An object whose pickle, when loaded, creates a file."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return (Path.touch, (self.sprung,))


def join_group() -> Ranks:
    """The two ranks of `on_ranks`, without a trainer."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return Ranks(rank, 2, dist.new_group(backend="gloo"))


def send_as_torch(trap: Trap, ranks: Ranks) -> None:
    """Send with torch's own function for objects, which ranks used before."""
    dist.broadcast_object_list([trap], src=0, group=ranks.hosts)


def send_as_torch_file(trap: Trap, ranks: Ranks) -> None:
    written = io.BytesIO()
    torch.save((None, trap), written)
    meeting.send(torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8), ranks.hosts)


def send_as_dictionary(trap: Trap, ranks: Ranks) -> None:
    sent = pickle.dumps({"a": [trap]})
    meeting.send(torch.frombuffer(bytearray(sent), dtype=torch.uint8), ranks.hosts)


@pytest.mark.parametrize("sends", [send_as_torch, send_as_torch_file, send_as_dictionary])
def test_data_sent_by_a_stranger_is_not_executed(tmp_path: Path, sends: Callable[[Trap, Ranks], None]) -> None:
    sprung = tmp_path / "sprung"

    def work(rank: int) -> str:
        ranks = join_group()
        if rank == 0:
            sends(Trap(sprung), ranks)
            return "sent"
        ranks.share(lambda: None)
        return "took it"

    results = on_ranks(2, work)
    assert not sprung.exists()
    assert results[0] == "sent" and results[1].startswith("NotPlainError: a rank sent what is no plain data"), results


def test_data_gathered_from_a_stranger_is_not_executed(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"

    def work(rank: int) -> str:
        ranks = join_group()
        if rank == 0:
            with pytest.raises(pickle.UnpicklingError):  # the other rank's answer is not a pickle
                dist.all_gather_object([None, None], Trap(sprung), group=ranks.hosts)
            assert sprung.exists()  # torch's own function executes even the object that it sent itself
            return "sent"
        ranks.gather("a word")
        return "took it"

    results = on_ranks(2, work)
    assert results[0] == "sent" and results[1].startswith("NotPlainError"), results


def test_sending_an_object_fails_on_all_ranks() -> None:
    def work(rank: int) -> str:
        with pytest.raises(NotPlainError if rank == 0 else LeaderFailedError, match="Trap: ranks hand each other"):
            join_group().share(lambda: {"metric": [Trap(Path("nowhere"))]})
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2


numbers = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text())
plain = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(60), derandomize=True)
@given(plain)
def test_plain_data_survives_encoding(value: Any) -> None:
    decoded = decode(encode(value))
    assert decoded == value
    assert repr(decoded) == repr(value), "types and signs of zeros are kept, too"


def test_numpy_numbers_become_python_numbers() -> None:
    value = {"rate": np.float64(0.1), "n": np.int32(3), "nan": float("nan")}
    decoded = decode(encode(value))
    assert decoded["rate"].hex() == (0.1).hex() and type(decoded["rate"]) is float
    assert decoded["n"] == 3 and type(decoded["n"]) is int and decoded["nan"] != decoded["nan"]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_batch_survives_encoding_bit_for_bit(kind: torch.dtype) -> None:
    batch = replace(batch_of(), groups=[])
    batch.rewards = batch.rewards.to(kind)
    batch.advantages[0, 0] = float("nan")
    failure, decoded = decode(encode((None, batch)))
    assert failure is None and type(decoded) is TrainBatch
    assert decoded.denominators == batch.denominators
    for entry in fields(TrainBatch):
        sent, received = getattr(batch, entry.name), getattr(decoded, entry.name)
        if isinstance(sent, torch.Tensor):
            assert sent.dtype == received.dtype and sent.shape == received.shape
            assert sent.contiguous().view(torch.uint8).equal(received.contiguous().view(torch.uint8))
        else:
            assert sent == received
