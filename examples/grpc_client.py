"""Plain grpcio with the generated messages; any language can do the same from proto/wire/inference.proto."""

import grpc

from wire import inference_pb2, inference_pb2_grpc

with grpc.insecure_channel("127.0.0.1:50051") as channel:
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(text="import os\n")
    request.options.max_tokens = 32
    request.options.temperature = 0  # the likeliest token each time
    for event in stub.Generate(request, timeout=60):
        print(event.chunk.text, end="", flush=True)
    print()
