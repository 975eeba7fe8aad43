"""The topics as an AsyncAPI 3.0 document, from loraq's side: it receives jobs and cancellations and sends events."""

from pydantic import JsonValue

from schemas.common import Lane

SCHEMA_FORMAT = "application/schema+json;version=draft-2020-12"

Document = dict[str, JsonValue]


def document() -> Document:
    """The whole document; payloads refer to the `*.schema.json` files in the same directory."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "loraq",
            "version": "1.0.0",
            "description": "Inference jobs for many LoRA adapters over one base model, from records to events.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": _channels(),
        "operations": _operations(),
        "components": {"messages": _messages(), "parameters": _parameters()},
    }


def _channels() -> Document:
    return {
        "jobs": _channel(
            "{prefix}.{pool}.jobs.{lane}",
            "JobRequest",
            "One record is one job. Key: `tenant/adapter` without the version, null for the base model. "
            "The lanes of a pool have equal partition counts; the partition is murmur2 of the key modulo that count.",
        ),
        "dead": _channel(
            "{prefix}.{pool}.jobs.dead",
            "DeadRecord",
            "Records that are not valid jobs, byte for byte as received; their headers hold the reason and the source.",
        ),
        "events": _channel("{prefix}.{pool}.events", "CloudEvent", "Terminal states of jobs. Key: the job_id."),
        "control": _channel("{prefix}.{pool}.control", "Cancellation", "Cancellations. Key: the tenant."),
    }


def _channel(address: str, message: str, description: str) -> Document:
    names = [name for name in ("prefix", "pool", "lane") if "{" + name + "}" in address]
    return {
        "address": address,
        "description": description,
        "parameters": {name: {"$ref": f"#/components/parameters/{name}"} for name in names},
        "messages": {message: {"$ref": f"#/components/messages/{message}"}},
    }


def _operations() -> Document:
    return {
        "receiveJob": _operation(
            "receive", "jobs", "JobRequest", "Receives a job, which ends in one row or as a dead record."
        ),
        "receiveCancellation": _operation(
            "receive", "control", "Cancellation", "Cancels one job, now or when it arrives."
        ),
        "sendEvent": _operation("send", "events", "CloudEvent", "Reports a terminal job after its row is committed."),
        "sendDeadRecord": _operation("send", "dead", "DeadRecord", "Dead-letters a record that is not a valid job."),
    }


def _operation(action: str, channel: str, message: str, summary: str) -> Document:
    return {
        "action": action,
        "summary": summary,
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{message}"}],
    }


def _messages() -> Document:
    trace: Document = {"type": "string", "description": "W3C Trace Context; the job's spans join this trace."}
    signature: Document = {
        "type": "string",
        "description": "HMAC-SHA256 of the value with the tenant's producer key, in hex, if signatures are required.",
    }
    return {
        "JobRequest": {
            **_message("job-request", "One inference job.", {"type": ["string", "null"], "examples": ["acme/tone"]}),
            "headers": {
                "type": "object",
                "properties": {"traceparent": trace, "loraq-signature": signature, **_replay_headers()},
            },
        },
        "CloudEvent": _message("cloud-event", "One job's terminal state.", {"type": "string", "format": "uuid"}),
        "Cancellation": _message("cancellation", "Cancels one job.", {"type": "string"}),
        "DeadRecord": {
            "name": "DeadRecord",
            "summary": "A record as received; any content.",
            "contentType": "application/octet-stream",
            "headers": {"type": "object", "properties": _dead_headers()},
            "payload": True,
        },
    }


def _replay_headers() -> Document:
    descriptions = {
        "loraq-replay-of": "Only if the job replays an ended one: the job_id of that job.",
        "loraq-origin": "Only on a replayed dead letter: its first topic/partition/offset/timestamp.",
        "loraq-dead-letter": "Only on a replayed dead letter: its partition:offset in the dead-letter topic.",
    }
    return {name: {"type": "string", "description": text} for name, text in descriptions.items()}


def _dead_headers() -> Document:
    descriptions = {
        "loraq-error-code": "Stable error code.",
        "loraq-error-message": "A sentence that names the culprit.",
        "loraq-source-topic": "Topic that the record came from.",
        "loraq-source-partition": "Its partition there.",
        "loraq-source-offset": "Its offset there.",
        "loraq-source-timestamp": "Its timestamp there, milliseconds since 1970.",
        "loraq-value-omitted": "Only if the record is too large for this topic: size of the omitted value in bytes.",
        "loraq-value-sha256": "SHA-256 of the omitted value, in hex.",
    }
    return {name: {"type": "string", "description": text} for name, text in descriptions.items()}


def _message(schema: str, summary: str, key: Document) -> Document:
    return {
        "name": schema,
        "summary": summary,
        "contentType": "application/json",
        "payload": {"schemaFormat": SCHEMA_FORMAT, "schema": {"$ref": f"./{schema}.schema.json"}},
        "bindings": {"kafka": {"key": key, "bindingVersion": "0.5.0"}},
    }


def _parameters() -> Document:
    return {
        "prefix": {"description": "LORAQ_TOPIC_PREFIX.", "default": "loraq"},
        "pool": {"description": "LORAQ_POOL: the deployment of one base model.", "default": "default"},
        "lane": {"description": "Priority class of the job.", "enum": [lane.value for lane in Lane]},
    }
