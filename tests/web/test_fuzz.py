"""Requests made from the OpenAPI page, good and bad ones: none makes the server fail."""

from collections import Counter
from contextlib import nullcontext, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from freenergy.web.app import create_app
from freenergy.web.model_server import ModelServer
from freenergy.web.settings import Limits, ServerSettings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")
pytestmark = [
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning"),  # schemathesis, not we
]
TOKEN = "a-token-for-every-request"
SETTINGS = ServerSettings(name="tiny", host="0.0.0.0", token=TOKEN)  # reached in this process under any name
KNOWN = {"/v1/completions", "/score", "/v1/models", "/v1/models/{name}", "/health", "/metrics"}


@pytest.fixture(scope="module")
def operations(joint):
    engine = ModelServer(joint, Limits(candidates=64, tokens=64, texts=8))
    engine.start()
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(engine, SETTINGS))
    yield [found.ok() for found in schema.get_all_operations()]
    assert len(engine.turns) == 0, "no question was left behind"
    engine.close()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_request_makes_the_server_fail(operations, mode):
    assert {operation.path for operation in operations} >= KNOWN
    statuses = Counter()
    for operation in operations:

        @settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"  # else all would end at the name
            response = case.call(headers={"authorization": f"Bearer {TOKEN}"})
            statuses[case.operation.path, response.status_code] += 1
            assert response.status_code < 500, (case.operation.label, case.body, response.text)
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        with nullcontext() if mode.is_positive else suppress(Unsatisfiable):  # nothing is wrong with what takes nothing
            ask()
    answered = {path for (path, status), count in statuses.items() if (status < 400) == mode.is_positive}
    assert {"/v1/completions", "/score"} <= answered, statuses
