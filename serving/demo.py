"""What `make demo` runs: a fact planted 8K tokens back, asked of the built-in model."""

import json
import time

from glm53 import chat
from serving.engine_options import BUILT_IN_MODEL, model_path
from serving.llm import LLM
from serving.sampling_params import SamplingParams

_DOCUMENT = "8000-0"


def main() -> None:
    """Asks for the fact planted furthest back and prints the answer beside the right one."""
    lines = (model_path(BUILT_IN_MODEL) / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    document = next(line for line in map(json.loads, lines) if line["id"] == _DOCUMENT)
    needle = min(document["questions"], key=lambda question: question["depth_tokens"])
    message = {"role": "user", "content": f"{document['text']}\n{needle['question']}"}
    prompt = chat.render([message], add_generation_prompt=True)

    print(f"Loading the built-in model '{BUILT_IN_MODEL}' (3M parameters).")
    llm = LLM(BUILT_IN_MODEL, max_num_seqs=1, max_model_len=16384)
    print("Compiling and reading the document. The first time this takes a minute or two.")
    start = time.perf_counter()
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=32))
    seconds = time.perf_counter() - start
    answer = chat.parse(output.outputs[0].text)

    num_tokens = len(output.prompt_token_ids)
    print()
    print(f"Document:  {num_tokens} tokens, the fact is {num_tokens - needle['depth_tokens']} back")
    print(f"Attention: {llm.config.index_topk} rows a token, chosen by the indexer")
    print(f"Question:  {needle['question']}")
    print(f"Answer:    {answer.content}")
    print(f"Planted:   {needle['answer']}")
    print(f"Time:      {seconds:.1f} s, compilation included")


if __name__ == "__main__":
    main()
