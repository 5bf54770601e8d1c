"""Kill −9 the study's server while eight raters vote: what was acknowledged is there, once."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import httpx
import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'freenergy[web]'")

from freenergy.apps.study import Store, Study, StudySettings, summarise
from freenergy.apps.study.items import Item

PAIRS, RATERS, KILLS = 36, 8, 2
SERVE = "from freenergy.cli.study import study_app; study_app()"


@pytest.fixture
def study(tmp_path):
    settings = StudySettings(prefixes=PAIRS, qualification=4)
    kinds = ["pair"] * PAIRS + ["check"] * settings.num_checks + ["qualification"] * 4
    items = [Item(number=i, kind=kind, prefix=f"p{i}", a=f"a{i}", b=f"b{i}") for i, kind in enumerate(kinds)]
    models = {side: {"name": side, "run": None} for side in "ab"}
    return Study(folder=tmp_path / "study", settings=settings, models=models, items=tuple(items)).write()


class Server:
    """A server that can be killed and started again at the same port."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [sys.executable, "-c", SERVE, "serve", str(folder), "--port", str(self.port)]
        self.process = None

    def start(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, env=environment)
        said = self.process.stderr.readline()
        assert f"at http://127.0.0.1:{self.port}" in said, said

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait(30)
        said = self.process.stderr.read()
        self.process.stderr.close()
        return said


def rate(address, token, acknowledged, stop):
    """Vote until there is nothing left, through every break; remember what was acknowledged."""
    with httpx.Client(base_url=address, timeout=10) as client:
        while not stop.is_set():
            try:
                if not client.cookies:
                    client.post("/enter", data={"token": token})
                    continue
                html = client.get("/rate").text
                if "<form" not in html:
                    return
                sent = {"page": re.search(r'name="page" value="([^"]+)"', html)[1]}
                words = re.findall(r'id="words-(\d)-(\d)" dir="auto">([ab])(\d+)<', html)
                # pairs by their number, known answers rightly
                wanted = {place: "ab"[int(item) % 2] if int(item) < PAIRS else "b" for place, _, _, item in words}
                sent |= {f"place-{place}": side for place, side, model, _ in words if model == wanted[place]}
                if client.post("/rate", data=sent).status_code == 303:
                    items = {int(item): wanted[place] for place, _, _, item in words}
                    acknowledged.append((sent["page"], items))
            except httpx.TransportError:
                time.sleep(0.02)


def test_no_vote_that_was_acknowledged_is_lost_and_none_counts_twice(study):
    with Store(study) as store:
        tokens = [invitation.token for invitation in store.invite(RATERS)]
    server, stop = Server(study.folder), threading.Event()
    server.start()
    acknowledged = [[] for _ in tokens]
    address = f"http://127.0.0.1:{server.port}"
    threads = [
        threading.Thread(target=rate, args=(address, token, pages, stop), daemon=True)
        for token, pages in zip(tokens, acknowledged, strict=True)
    ]
    for thread in threads:
        thread.start()
    said = []
    try:
        for kill in range(1, KILLS + 1):
            deadline = time.monotonic() + 60
            while sum(map(len, acknowledged)) < 15 * kill:
                assert time.monotonic() < deadline, "the raters do not get on"
                time.sleep(0.001)
            said.append(server.end(signal.SIGKILL))
            check(study, acknowledged)
            server.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        stop.set()
        said.append(server.end(signal.SIGTERM))
    assert server.process.returncode == 0
    check(study, acknowledged)
    with Store(study) as store:
        found = summarise(store)
    assert found["votes"] == {"given": 3 * PAIRS, "dropped": 0, "kept": 3 * PAIRS}
    assert [(row["a"], row["b"]) for row in found["by_pair"]] == [(3, 0), (0, 3)] * (PAIRS // 2)
    assert not any(token in words for token in tokens for words in said), "a token was logged"


def check(study, acknowledged):
    """Every page that was acknowledged is in the file, with its own votes; no vote is there twice."""
    db = sqlite3.connect(study.folder / "answers.sqlite")
    query = """SELECT pages.token, votes.item, votes.side, places.first, pages.rater
               FROM votes JOIN places USING (page, place) JOIN pages ON pages.id = votes.page"""
    rows = db.execute(query).fetchall()
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    found = {}
    for token, item, side, first, _ in rows:
        found.setdefault(token, {})[item] = first if side == 1 else {"a": "b", "b": "a"}[first]
    for pages in acknowledged:
        for token, items in list(pages):
            assert found.get(token) == items
    of_rater = [(rater, item) for _, item, _, _, rater in rows]
    assert len(set(of_rater)) == len(of_rater)
