"""Log lines are one JSON object each and carry the request id of the task."""

import json
import logging

from mimo.logs import JsonFormatter, TextFormatter, bind_request_id


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "here"})
    made.__dict__.update(extra)
    return made


def test_json_line() -> None:
    with bind_request_id("req_1"):
        entry = json.loads(JsonFormatter("vision").format(record("ready", patches=4)))
    assert entry["component"] == "vision"
    assert entry["request_id"] == "req_1"
    assert entry["patches"] == 4
    assert entry["message"] == "ready"
    assert "request_id" not in json.loads(JsonFormatter("vision").format(record("x")))


def test_text_line() -> None:
    line = TextFormatter("llm").format(record("step", tokens=3))
    assert line.endswith("llm info: step  tokens=3")
