"""The explorer without a browser: what it answers, and whom it refuses."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from starlette.datastructures import Headers

from lipkit.errors import DataError, LipkitError, OptionError, RunError
from lipkit.experiments import run as pipeline
from lipkit.experiments.build import load_data
from lipkit.explorer import ExploredRun, listen, make_app, open_runs, serve
from lipkit.explorer.server import HEADERS, authorities, is_loopback, refused

pytestmark = pytest.mark.thorough

HOST = "127.0.0.1:8000"


def get(runs: list[ExploredRun], path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app(runs, authorities("127.0.0.1", 8000)))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(request())


def test_the_page_escapes_names_and_loads_nothing_from_elsewhere(runs: list[ExploredRun]) -> None:
    answer = get(runs, "/")
    assert answer.status_code == 200
    assert "<img src=x" not in answer.text
    assert "&lt;img src=x onerror=alert(1)&gt;" in answer.text
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    for name in ("explore.js", "explore.css"):
        text = get(runs, f"/static/{name}").text
        assert len(text) > 1000
        # the one address in it names the SVG format
        assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert get(runs, "/static/../server.py").status_code == 404
    assert get(runs, "/static/server.py").status_code == 404
    assert get(runs, "/docs").status_code == get(runs, "/openapi.json").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "127.0.0.1:8001"}, 403),
        ({"host": "127.0.0.1"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "127.0.0.1:8000@evil.example"}, 403),
        ({"origin": f"http://{HOST}"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "https://127.0.0.1:8000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 400),
        ({"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_refused(runs: list[ExploredRun], headers: dict[str, str], status: int) -> None:
    answer = get(runs, "/api/runs/0/samples/0", headers)
    assert answer.status_code == status
    assert ("image" in answer.text) == (status == 200)


@pytest.mark.parametrize("hosts", [[], [HOST, "evil.example"], [HOST, HOST]])
def test_a_request_names_one_host(hosts: list[str]) -> None:
    headers = Headers(raw=[(b"host", host.encode()) for host in hosts])
    assert refused(headers, authorities("127.0.0.1", 8000)) == 403


class Attacks:
    """In place of `ExploredRun.attack`: notes which samples are attacked, and waits until they may end."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.running = self.most = 0
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, index: int, eps: float) -> dict[str, Any]:
        self.samples.append(index)
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.set()
        assert self.may_end.wait(60)
        self.running -= 1
        return {"index": index}


@pytest.fixture
def served(runs: list[ExploredRun], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Attacks]]:
    """The address of a real server, and the attacks that it makes."""
    attacks = Attacks()
    monkeypatch.setattr(ExploredRun, "attack", lambda run, index, eps: attacks(index, eps))
    listener, address = listen()
    threading.Thread(target=lambda: serve(runs, listener), daemon=True).start()
    yield address, attacks
    attacks.may_end.set()


def test_one_attack_at_a_time_and_other_requests_are_answered_meanwhile(served: tuple[str, Attacks]) -> None:
    address, attacks = served
    with ThreadPoolExecutor(60) as pool:
        url = f"{address}api/runs/0/samples"
        asked = [pool.submit(httpx.get, f"{url}/{i}/attack?eps=1", timeout=60) for i in range(60)]
        try:
            assert attacks.begun.wait(60)
            assert httpx.get(f"{url}/3", timeout=20).json()["index"] == 3
        finally:
            attacks.may_end.set()
        assert [answer.result().json()["index"] for answer in asked] == list(range(60))
    assert (attacks.most, sorted(attacks.samples)) == (1, list(range(60)))


def test_an_attack_whose_client_is_gone_is_dropped(served: tuple[str, Attacks]) -> None:
    address, attacks = served
    place = urlsplit(address)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.get, f"{address}api/runs/0/samples/0/attack?eps=1", timeout=60)
        assert attacks.begun.wait(60)
        for index in range(1, 9):
            with socket.create_connection((place.hostname, place.port), timeout=10) as client:
                request = f"GET /api/runs/0/samples/{index}/attack?eps=1 HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n"
                client.sendall(request.encode())
        httpx.get(f"{address}api/runs/0/samples/0", timeout=20)  # behind those on the server's loop
        attacks.may_end.set()
        assert first.result().status_code == 200
    assert httpx.get(f"{address}api/runs/0/samples/9/attack?eps=1", timeout=60).status_code == 200
    assert attacks.samples == [0, 9]


def test_it_ends_when_it_is_interrupted_whatever_was_asked(folders: list[Path]) -> None:
    code = (
        "import sys, time; from lipkit.cli.main import main; from lipkit.explorer.runs import ExploredRun;"
        "ExploredRun.attack = lambda run, index, eps: print('attack', flush=True) or time.sleep(2) or {};"
        f"sys.exit(main(['explore', {str(folders[0])!r}]))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        place = urlsplit(process.stdout.readline().split()[0])
        clients = [socket.create_connection((place.hostname, place.port), timeout=60) for _ in range(60)]
        for index, client in enumerate(clients):
            request = f"GET /api/runs/0/samples/{index}/attack?eps=1 HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n"
            client.sendall(request.encode())
        assert process.stdout.readline() == "attack\n"
        process.send_signal(signal.SIGINT)
        more, error = process.communicate(timeout=60)
    for client in clients:
        client.close()
    assert (process.returncode, error.strip()) == (130, "lipkit: interrupted")
    assert more.count("attack") <= 2


def test_samples_attacks_and_the_curve_agree_with_the_certificate(runs: list[ExploredRun]) -> None:
    run = runs[0]
    summary = get(runs, "/api/runs").json()
    curve = summary["runs"][0]["curve"]
    # A point for each position of the slider: between two points the page would show more than is proved.
    assert curve["eps"] == [step / 255 for step in range(round(255 * summary["largest"]) + 1)]
    for eps, share in zip(curve["eps"], curve["certified"], strict=True):
        assert share == pytest.approx(run.certificate.accuracy(eps), abs=1e-12)
    chosen = int((run.certificate.correct & (run.certificate.radius > 0.05)).nonzero()[0][0])
    sample = get(runs, f"/api/runs/0/samples/{chosen}").json()
    x, y = run.split.batch(torch.tensor([chosen]))
    with torch.no_grad():
        logits = run.exact(x.double())[0]
    others = logits.clone()
    others[int(y[0])] = -torch.inf
    assert sample["margin"] == pytest.approx(float(logits[int(y[0])] - others.max()), abs=1e-9)
    assert sample["image"].startswith("data:image/png;base64,")
    below = get(runs, f"/api/runs/0/samples/{chosen}/attack", None).status_code
    assert below == 422  # no radius
    inside = get(runs, f"/api/runs/0/samples/{chosen}/attack?eps={run.certificate.radius[chosen].item() * 0.99}").json()
    assert (inside["verdict"], inside["found"]) == ("certified", False)
    far = get(runs, f"/api/runs/0/samples/{chosen}/attack?eps=3").json()
    assert (far["verdict"], far["found"], far["certified"]) == ("broken", True, False)
    assert run.certificate.radius[chosen].item() <= far["norm"] <= 3
    assert far["prediction"] != sample["label"]
    assert get(runs, f"/api/runs/0/samples/{chosen}/attack?eps=0").json()["verdict"] == "certified"


def test_a_misclassified_sample_is_called_wrong(runs: list[ExploredRun]) -> None:
    wrong = (~runs[0].certificate.correct).nonzero()[:, 0]
    assert len(wrong), "two epochs leave errors"
    assert runs[0].attack(int(wrong[0]), 0.5)["verdict"] == "wrong"


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/2/samples/0",
        "/api/runs/-1/samples/0",
        "/api/runs/0/samples/100000",
        "/api/runs/0/samples/-1",
        "/api/runs/0/samples/zero",
        "/api/runs/0/samples/0/attack?eps=-1",
        "/api/runs/0/samples/0/attack?eps=nan",
        "/api/runs/0/samples/0/attack?eps=1e300",
    ],
)
def test_bad_addresses_are_answered_in_one_sentence(runs: list[ExploredRun], path: str) -> None:
    answer = get(runs, path)
    assert answer.status_code == 422
    assert "detail" in answer.json()


def test_a_page_of_thumbnails_stays_in_range(runs: list[ExploredRun]) -> None:
    assert [row["index"] for row in get(runs, "/api/runs/0/page?start=5&count=3").json()] == [5, 6, 7]
    assert get(runs, "/api/runs/0/page?start=1000000&count=3").json() == []
    assert len(get(runs, "/api/runs/0/page?start=0&count=1000000").json()) == 64
    assert get(runs, "/api/runs/0/page?start=-5&count=2").json() == []


def test_only_loopback_unless_told() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.3.2.1")))
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        with pytest.raises(OptionError, match="expected a loopback address"):
            listen(host)
    listener, address = listen("0.0.0.0", allow_remote=True)
    listener.close()
    assert address.startswith("http://0.0.0.0:")


def test_runs_that_do_not_fit_are_refused(folders: list[Path], runs: list[ExploredRun], tmp_path: Path) -> None:
    data = load_data(pipeline.read_recipe(folders[0]))
    with pytest.raises(OptionError, match="expected one run, or two to compare, got 0"):
        open_runs([])
    with pytest.raises(OptionError, match="got 3"):
        open_runs([(folders[0], data.test, data.classes)] * 3)
    with pytest.raises(RunError, match="expected radii of 5 test samples"):
        open_runs([(folders[0], data.test.take(5), data.classes)])
    copied = tmp_path / "copied"
    shutil.copytree(folders[0], copied)
    shutil.rmtree(copied / "network")
    shutil.copytree(folders[1] / "network", copied / "network")
    with pytest.raises(RunError, match="expected the network of its record, got another"):
        open_runs([(copied, data.test, data.classes)])
    (copied / "certificate.jsonl").write_text("index,label\n0,1\n")
    shutil.rmtree(copied / "network")
    shutil.copytree(folders[0] / "network", copied / "network")
    with pytest.raises(DataError, match="line 1: expected JSON"):
        open_runs([(copied, data.test, data.classes)])
    (copied / "certificate.jsonl").unlink()
    with pytest.raises(RunError, match="run lipkit certify"):
        open_runs([(copied, data.test, data.classes)])
    (copied / "record.json").unlink()
    with pytest.raises(LipkitError):
        open_runs([(copied, data.test, data.classes)])


def test_the_command_refuses_the_network_before_it_reads_data(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lipkit.cli.explore import command

    outcome: Any = CliRunner().invoke(command, [str(tmp_path), "--host", "0.0.0.0"])
    assert isinstance(outcome.exception, OptionError)
    assert "expected a loopback address" in str(outcome.exception)


def test_the_command_says_its_address_before_it_reads_anything(tmp_path: Path) -> None:
    """Nothing that is slow to import is there when the address is printed, and the port is open."""
    code = (
        "import sys, click; from lipkit.cli.main import main; echo = click.echo;"
        "heavy = {'torch', 'numpy', 'fastapi', 'pydantic'};"
        "click.echo = lambda text, **o: echo(f'{text} {sorted(heavy & set(sys.modules))}', **o);"
        f"sys.exit(main(['explore', {str(tmp_path)!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.rstrip().endswith("[]"), line
            asked = urlsplit(line.split()[0])
            socket.create_connection((asked.hostname, asked.port), timeout=10).close()
        finally:
            process.terminate()


def test_who_asks_before_the_runs_are_read_waits_for_the_page(runs: list[ExploredRun]) -> None:
    listener, address = listen()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.get, address, timeout=60)
        threading.Thread(target=lambda: serve(runs, listener), daemon=True).start()
        assert "first" in answer.result().text


def test_the_command_says_at_once_that_a_folder_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lipkit.cli.main import main

    assert main(["explore", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "expected the folder of a run, got" in captured.err
    assert main(["explore", *[str(tmp_path)] * 3]) == 2
    assert capsys.readouterr() == ("", f"lipkit: Got unexpected extra argument ({tmp_path})\n")
