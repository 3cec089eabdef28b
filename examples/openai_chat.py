"""Chat through the OpenAI package, streaming. Start a cluster first: `baton up`."""

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What does `os.path.join` do?"}],
    max_completion_tokens=64,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
