"""Send 32 completions at the same time and see both ranks at work: python examples/many_at_once.py"""

import asyncio
import time

import httpx
from openai import AsyncOpenAI

URL = "http://127.0.0.1:8000"
COUNT, TOKENS = 32, 64


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused")
    model = (await client.models.list()).data[0].id
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.completions.create(model=model, prompt=f"{n} is a number that", max_tokens=TOKENS)
            for n in range(COUNT)
        )
    )
    elapsed = time.perf_counter() - began
    tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    print(f"{tokens} tokens in {elapsed:.1f} s: {tokens / elapsed:.0f} tokens/s")
    async with httpx.AsyncClient() as http:
        metrics = (await http.get(f"{URL}/metrics")).text
    print("\n".join(line for line in metrics.splitlines() if line.startswith("phalanx_") and 'rank="' in line))


asyncio.run(main())
