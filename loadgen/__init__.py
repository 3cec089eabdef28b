"""The load generator: offers a workload to a server, and reports what its clients saw.

Of the server it uses only the two public protocols, gRPC (`proto/wire/inference.proto`) and OpenAI's HTTP, so it measures
any OpenAI server by the same rules.

    config ─► schedule + workload ─► runner ─► target (gRPC | HTTP) ─► records ─► report (table, JSON, HTML)
"""
