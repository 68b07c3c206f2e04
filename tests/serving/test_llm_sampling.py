"""Sampling, stop texts, streaming and chat through the offline entry point."""

import copy
import dataclasses
import json
import pickle
import time
from typing import Any

import numpy as np
import pytest

from glm53 import LLM, SamplingParams, chat
from serving.engine.model_runner import ModelRunner
from serving.requests.outputs import CompletionOutput, RequestOutput

pytestmark = pytest.mark.compiles
PROMPT = "The Congress of the United States"
OTHERS = ["The people", "Our commerce with", "It is the duty of the"]
QUESTION = {"role": "user", "content": "The code of mint is 31-94.\nWhat is the code of mint?"}


@pytest.fixture(scope="module")
def llm(tiny_llm: LLM) -> LLM:
    return tiny_llm


@pytest.fixture(autouse=True)
def idle(llm: LLM):
    """After every test no page is in use and none is lost."""
    yield
    cache = llm._engine.runner.cache
    cache.check_integrity()
    assert cache.pool.num_free + cache.pool.num_cached_only == cache.geometry.num_pages
    assert len(llm._engine.scheduler) == llm._engine.scheduler.num_running == 0
    llm._engine.scheduler.check_integrity()


def tokens(output: RequestOutput) -> list[list[int]]:
    return [part.token_ids for part in output.outputs]


def test_seeded_alone_and_in_a_crowd(llm: LLM) -> None:
    """A seeded request gives the same tokens alone, again, and among others in any order."""
    params = SamplingParams(seed=11, max_tokens=24, top_p=0.9, ignore_eos=True)
    (alone,) = llm.generate(PROMPT, params)
    (again,) = llm.generate(PROMPT, params)
    assert tokens(alone) == tokens(again)
    crowd = [SamplingParams(seed=seed, max_tokens=5 * seed, top_k=50) for seed in (1, 2, 3)]
    first, *_ = llm.generate([PROMPT, *OTHERS], [params, *crowd])
    *_, last = llm.generate([*OTHERS, PROMPT], [*crowd, params])
    assert tokens(first) == tokens(last) == tokens(alone)
    (other,) = llm.generate(PROMPT, SamplingParams(seed=12, max_tokens=24, ignore_eos=True))
    assert tokens(other) != tokens(alone)


def test_unseeded_outputs_differ(llm: LLM) -> None:
    """Without a seed each continuation is another draw."""
    (output,) = llm.generate(PROMPT, SamplingParams(n=4, max_tokens=24))
    assert len({tuple(ids) for ids in tokens(output)}) == 4


def test_continuations_have_consecutive_seeds(llm: LLM) -> None:
    """The i-th of n continuations is the one that seed + i gives alone."""
    (several,) = llm.generate(PROMPT, SamplingParams(n=3, seed=5, max_tokens=8))
    assert [part.index for part in several.outputs] == [0, 1, 2]
    for index, ids in enumerate(tokens(several)):
        (one,) = llm.generate(PROMPT, SamplingParams(seed=5 + index, max_tokens=8))
        assert tokens(one) == [ids]


def test_more_continuations_than_slots(llm: LLM) -> None:
    """They run in turn."""
    (output,) = llm.generate(PROMPT, SamplingParams(n=6, seed=0, max_tokens=4))
    assert [len(ids) for ids in tokens(output)] == [4] * 6


def test_the_model_says_how_to_sample(llm: LLM) -> None:
    """What is left out is the model's top_p of 0.95, and what is said is not overridden."""
    assert llm._engine.input_processor.generation_config.sampling == {
        "temperature": 1.0,
        "top_p": 0.95,
    }
    seeds: list[dict[str, Any]] = [
        dict(seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)
    ]
    left_out = llm.generate([PROMPT] * 4, [SamplingParams(**seed) for seed in seeds])
    same = llm.generate([PROMPT] * 4, [SamplingParams(top_p=0.95, **seed) for seed in seeds])
    whole = llm.generate([PROMPT] * 4, [SamplingParams(top_p=1.0, **seed) for seed in seeds])
    assert list(map(tokens, left_out)) == list(map(tokens, same))
    assert list(map(tokens, left_out)) != list(map(tokens, whole))


def test_greedy_beside_sampled(llm: LLM) -> None:
    """A greedy request has its own tokens whether or not others in the batch are sampled."""
    greedy = SamplingParams(temperature=0, max_tokens=16)
    (alone,) = llm.generate(PROMPT, greedy)
    mixed, _ = llm.generate([PROMPT, OTHERS[0]], [greedy, SamplingParams(seed=1, max_tokens=16)])
    assert tokens(mixed) == tokens(alone)
    (one,) = llm.generate(PROMPT, SamplingParams(top_k=1, seed=3, max_tokens=16))
    assert tokens(one) == tokens(alone)


def test_lists_of_tokens(llm: LLM) -> None:
    """Bias, allowed tokens and bad words change the greedy choice as they say."""
    assert llm.tokenizer is not None
    (plain,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))
    first = tokens(plain)[0][0]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    (banned,) = llm.generate(PROMPT, SamplingParams(logit_bias={first: -100}, **greedy))
    assert first not in tokens(banned)[0]
    (wanted,) = llm.generate(PROMPT, SamplingParams(logit_bias={777: 100}, **greedy))
    assert tokens(wanted) == [[777] * 6]
    (allowed,) = llm.generate(PROMPT, SamplingParams(allowed_token_ids=[31, 32, 999], **greedy))
    assert set(tokens(allowed)[0]) <= {31, 32, 999}
    text = plain.outputs[0].text
    word = text.split()[1]
    (without,) = llm.generate(PROMPT, SamplingParams(bad_words=[word], **greedy))
    assert word in text
    assert word not in without.outputs[0].text.split()


def test_a_bad_newline(llm: LLM) -> None:
    """It is the newline that is not generated, and spaces are."""
    newline = SamplingParams(
        temperature=0, max_tokens=3, logit_bias={198: 50.0, 220: 40.0}, bad_words=["\n"]
    )
    (output,) = llm.generate(PROMPT, newline)
    assert output.outputs[0].text == "   "


def test_penalties(llm: LLM) -> None:
    """A frequency penalty ends repetition; the repetition penalty counts the prompt too."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    (plain,) = llm.generate(PROMPT, SamplingParams(**greedy))
    (varied,) = llm.generate(PROMPT, SamplingParams(frequency_penalty=2, **greedy))
    assert len(set(tokens(varied)[0])) > len(set(tokens(plain)[0]))
    (new,) = llm.generate(PROMPT, SamplingParams(repetition_penalty=1e6, **greedy))
    assert len(set(tokens(new)[0])) == 40
    assert not set(tokens(new)[0]) & set(new.prompt_token_ids)


def test_min_tokens(llm: LLM) -> None:
    """End ids, stop ids and stop texts wait until there are enough tokens."""
    prompt = chat.render([QUESTION], add_generation_prompt=True)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    (plain,) = llm.generate(prompt, SamplingParams(**greedy))
    length = len(tokens(plain)[0])
    assert plain.outputs[0].finish_reason == "stop"
    (longer,) = llm.generate(prompt, SamplingParams(min_tokens=length + 5, **greedy))
    assert len(tokens(longer)[0]) >= length + 5
    assert not llm._engine.input_processor.eos_token_ids & set(tokens(longer)[0][: length + 4])
    (exact,) = llm.generate(prompt, SamplingParams(min_tokens=length - 1, **greedy))
    assert tokens(exact) == tokens(plain)
    (stopped,) = llm.generate(prompt, SamplingParams(stop="code", **greedy))
    assert stopped.outputs[0].text == "</think>The "
    assert stopped.outputs[0].stop_reason == "code"
    (late,) = llm.generate(prompt, SamplingParams(stop="code", min_tokens=5, **greedy))
    assert late.outputs[0].text == plain.outputs[0].text


def test_allowed_tokens_that_only_stop(llm: LLM) -> None:
    """min_tokens would leave nothing to generate: refused."""
    eos = sorted(llm._engine.input_processor.eos_token_ids)
    with pytest.raises(ValueError, match="allowed_token_ids are all stop ids"):
        llm.generate(PROMPT, SamplingParams(allowed_token_ids=eos, min_tokens=2))


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_beyond_the_vocabulary(llm: LLM, field: str) -> None:
    """Refused by the name of the field and the id."""
    fields: dict[str, Any] = {field: {9999: 1.0} if field == "logit_bias" else [9999]}
    with pytest.raises(ValueError, match=rf"prompts\[0\]: {field} holds token id 9999"):
        llm.generate(PROMPT, SamplingParams(**fields))


def test_more_bias_than_a_slot_holds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the sampler are refused before anything is computed."""
    monkeypatch.setattr(ModelRunner, "launch_prefill", lambda *_: pytest.fail("a prompt was begun"))
    params = SamplingParams(logit_bias={token: 1.0 for token in range(1025)})
    with pytest.raises(ValueError, match=r"logit_bias has 1025 tokens, the limit is 1024"):
        llm.generate(["fine", PROMPT], [SamplingParams(), params])


@pytest.mark.parametrize("count", [0, 3, -1])
def test_logprobs(llm: LLM, count: int) -> None:
    """The best tokens and the chosen one, before penalties and temperature, as the prompt's are."""
    params = SamplingParams(seed=2, max_tokens=6, logprobs=count, temperature=2.0)
    (output,) = llm.generate(PROMPT, params)
    part = output.outputs[0]
    assert part.logprobs is not None
    whole = {"prompt_token_ids": output.prompt_token_ids + part.token_ids}
    (scored,) = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=count))
    assert scored.prompt_logprobs is not None
    expected = scored.prompt_logprobs[len(output.prompt_token_ids) :]
    total = 0.0
    for token, got, want in zip(part.token_ids, part.logprobs, expected, strict=True):
        assert want is not None
        assert list(got) == list(want)
        for other in list(got)[:5]:
            assert got[other] == want[other]
        vocab = llm.config.vocab_size
        assert len(got) in ((vocab,) if count == -1 else (max(count, 1), count + 1))
        total += got[token].logprob
    assert part.cumulative_logprob == pytest.approx(total)
    (without,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert without.outputs[0].logprobs is None
    assert without.outputs[0].cumulative_logprob is None


def test_logprobs_sum_to_one(llm: LLM) -> None:
    """-1 is the whole vocabulary's distribution."""
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=-1))
    assert output.outputs[0].logprobs is not None
    (entry,) = output.outputs[0].logprobs
    assert sum(np.exp(entry[token].logprob) for token in entry) == pytest.approx(1, abs=1e-5)


def test_stop_texts(llm: LLM) -> None:
    """The output ends before the first stop text, or behind it, and names it."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
    (plain,) = llm.generate(PROMPT, SamplingParams(**greedy))
    text = plain.outputs[0].text
    stop = text[9:14]
    cut = text.index(stop)
    (output,) = llm.generate(PROMPT, SamplingParams(stop=[stop, "never"], **greedy))
    part = output.outputs[0]
    assert (part.text, part.finish_reason, part.stop_reason) == (text[:cut], "stop", stop)
    assert len(part.token_ids) < 32
    params = SamplingParams(stop=stop, include_stop_str_in_output=True, **greedy)
    (output,) = llm.generate(PROMPT, params)
    assert output.outputs[0].text == text[: cut + len(stop)]


def test_ids_without_text(llm: LLM) -> None:
    """`detokenize` false leaves the text empty, also of log-probabilities, and all else as it is;
    another request of the batch has its texts."""
    scored: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": 1,
        "prompt_logprobs": 1,
    }
    params = [SamplingParams(**scored), SamplingParams(detokenize=False, **scored)]
    plain, output = llm.generate([PROMPT] * 2, params)
    assert tokens(output) == tokens(plain)
    assert output.outputs[0].text == ""

    def found(output: RequestOutput) -> list[dict[int, Any]]:
        (part,) = output.outputs
        entries = [*(output.prompt_logprobs or [])[1:], *(part.logprobs or [])]
        return [dict(entry) for entry in entries if entry is not None]

    assert len(found(plain)) == len(found(output)) == len(output.prompt_token_ids) - 1 + 8
    for with_text, without in zip(found(plain), found(output), strict=True):
        assert None not in {entry.decoded_token for entry in with_text.values()}
        assert without == {
            token: dataclasses.replace(entry, decoded_token=None)
            for token, entry in with_text.items()
        }


def test_outputs_are_plain_data(llm: LLM) -> None:
    """Copied, pickled and written as JSON, whatever was asked for, also while they grow."""
    params = SamplingParams(n=2, max_tokens=3, logprobs=2, prompt_logprobs=-1, seed=1)
    outputs = [output for _, output in llm.generate_iter("The people", params, stream=True)]
    assert len(outputs) > 1
    for output in outputs:
        assert pickle.loads(pickle.dumps(output)) == copy.deepcopy(output) == output
        again = json.loads(json.dumps(output.to_dict()))
        assert again["outputs"][0]["token_ids"] == tokens(output)[0]
    whole = outputs[-1].to_dict()
    assert {len(entry) for entry in whole["prompt_logprobs"][1:]} == {llm.config.vocab_size}
    snapshot = llm.metrics()
    assert pickle.loads(pickle.dumps(snapshot)) == copy.deepcopy(snapshot) == snapshot


def test_times_of_a_request(llm: LLM) -> None:
    """They come one after another; those that wait have waited; a failed one has none."""
    before = time.time()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    # One more than runs at once.
    outputs = llm.generate([PROMPT, *OTHERS, PROMPT, ""], params, on_error="return")
    after = time.time()
    for output in outputs[:-1]:
        times = output.metrics
        assert times is not None
        assert None not in (times.time_in_queue, times.first_token_time, times.finished_time)
        started = times.arrival_time + (times.time_in_queue or 0)
        assert before <= times.arrival_time <= started
        assert started <= (times.first_token_time or 0) < (times.finished_time or 0) <= after
    first, last = outputs[0].metrics, outputs[4].metrics
    assert first is not None
    assert last is not None
    assert last.arrival_time + (last.time_in_queue or 0) > (first.first_token_time or 0)
    assert outputs[-1].metrics is None


def test_times_while_a_request_runs(llm: LLM) -> None:
    """What has not come has no time."""
    params = SamplingParams(temperature=0, max_tokens=3, n=2, ignore_eos=True)
    seen = [output.metrics for _, output in llm.generate_iter(PROMPT, params, stream=True)]
    assert [times is not None and times.finished_time is not None for times in seen] == [
        False,
        *[False] * (len(seen) - 2),
        True,
    ]
    assert {times and times.first_token_time for times in seen} == {
        seen[0] and seen[0].first_token_time
    }


def test_what_an_engine_tells(llm: LLM) -> None:
    """The tokenizer, what is sampled with by default, and the counts that a loop has."""
    assert llm.get_tokenizer() is llm.tokenizer is not None
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 0.95, 0)
    (output,) = llm.generate(PROMPT, dataclasses.replace(defaults, seed=3))
    (same,) = llm.generate(PROMPT, SamplingParams(seed=3))
    assert tokens(output) == tokens(same)
    before = llm.metrics()
    llm.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    after = llm.metrics()
    assert after.generated_tokens == before.generated_tokens + 3
    assert after.device_pages == llm._engine.runner.geometry.device_pages
    assert (after.num_running, after.num_waiting, after.num_preempted) == (0, 0, 0)


def test_outputs_in_order_of_completion(llm: LLM) -> None:
    """Short outputs come before long ones, each with its index among the prompts."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 20, 10, 2)]
    expected = llm.generate([PROMPT, *OTHERS], params)
    found = list(llm.generate_iter([PROMPT, *OTHERS], params))
    indices = [index for index, _ in found]
    assert sorted(indices) == [0, 1, 2, 3]
    assert indices[-1] == 0
    for index, output in found:
        assert output.finished
        assert tokens(output) == tokens(expected[index])


def test_streaming(llm: LLM) -> None:
    """Text and ids only grow, and end as the whole output."""
    params = SamplingParams(seed=4, max_tokens=24, n=2, stop=["zz"])
    expected = llm.generate([PROMPT, OTHERS[0]], params)
    last: dict[int, RequestOutput] = {}
    for index, output in llm.generate_iter([PROMPT, OTHERS[0]], params, stream=True):
        if index in last:
            assert not last[index].finished
            for before, after in zip(last[index].outputs, output.outputs, strict=True):
                assert after.text.startswith(before.text)
                assert after.token_ids[: len(before.token_ids)] == before.token_ids
        last[index] = output
    for index, output in last.items():
        assert output.finished
        assert output.outputs == expected[index].outputs


def test_a_caller_that_stops_listening(llm: LLM) -> None:
    """Closing the iterator aborts what is left, and what another iterator runs goes on."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = llm.generate(OTHERS[0], params)
    dropped = llm.generate_iter([PROMPT] * 6, params, stream=True)
    kept = llm.generate_iter(OTHERS[0], params, stream=True)
    next(dropped)
    next(kept)
    dropped.close()  # pyright: ignore[reportAttributeAccessIssue]
    *_, (_, output) = kept
    assert output.finished
    assert tokens(output) == tokens(expected)


def test_on_error_return(llm: LLM) -> None:
    """Bad prompts come back with their error, good ones are served."""
    prompts = [PROMPT, "", {"prompt_token_ids": [9999]}, OTHERS[0], {"x": 1}]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), on_error="return")
    assert [output.error is None for output in outputs] == [True, False, False, True, False]
    assert "is empty" in str(outputs[1].error)
    assert "9999" in str(outputs[2].error)
    for output in outputs:
        assert output.finished
        assert len(output.outputs) == (output.error is None)


@pytest.mark.usefixtures("as_a_user")
def test_unknown_on_error(llm: LLM) -> None:
    """Neither of the two."""
    with pytest.raises(ValueError, match="on_error must be"):
        llm.generate(PROMPT, on_error="ignore")  # pyright: ignore[reportArgumentType]


def test_prompt_alone(llm: LLM) -> None:
    """Without output a prompt has its log-probabilities."""
    prompt = np.arange(60)
    given: dict[str, Any] = {"prompt_logprobs": 0, "temperature": 0, "logprobs": 0}
    (whole,) = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=0, n=2, **given)
    )
    (part,) = llm.generate({"prompt_token_ids": prompt[:-1]}, SamplingParams(max_tokens=1, **given))
    assert whole.prompt_logprobs is not None
    assert part.prompt_logprobs is not None
    values = [entry and entry.token_logprob for entry in whole.prompt_logprobs]
    assert values[:-1] == [entry and entry.token_logprob for entry in part.prompt_logprobs]
    assert values[-1] is not None
    for index, output in enumerate(whole.outputs):
        assert output == CompletionOutput(index, "", [], 0.0, [], "length", None)
    with pytest.raises(ValueError, match=r"513 tokens.*max_model_len 512"):
        llm.generate({"prompt_token_ids": [7] * 513}, SamplingParams(max_tokens=0))


def test_chat(llm: LLM) -> None:
    """One conversation or several; the text parses into the assistant's message."""
    greedy = SamplingParams(temperature=0, max_tokens=40)
    (one,) = llm.chat([QUESTION], greedy)
    assert one.prompt == chat.render([QUESTION], add_generation_prompt=True)
    assert chat.parse(one.outputs[0].text).content == "The code of mint is 31-94."
    several = llm.chat(iter([[QUESTION], [{"role": "user", "content": "Hello"}]]), greedy)
    assert tokens(several[0]) == tokens(one)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (tooled,) = llm.chat(
        [QUESTION], greedy, tools=tools, chat_template_kwargs={"reasoning_effort": "high"}
    )
    expected = chat.render([QUESTION], tools, add_generation_prompt=True, reasoning_effort="high")
    assert tooled.prompt == expected


def test_forms_of_a_conversation(llm: LLM) -> None:
    """A past message as other systems write it gives the prompt of one as the template has it."""
    call = {"name": "now", "arguments": {}}
    plain: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    other: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": None, "reasoning": "r"},
        {"role": "tool", "content": "1"},
    ]
    short = SamplingParams(max_tokens=1)
    for arguments in ("", "{}", None):
        other[2]["tool_calls"] = [{"function": {"name": "now", "arguments": arguments}}]
        (output,) = llm.chat(other, short)
        assert output.prompt == chat.render(plain, add_generation_prompt=True)
        (output,) = llm.generate([{"messages": other}], short)
        assert output.prompt == chat.render(plain, add_generation_prompt=True)


def test_end_of_a_conversation(llm: LLM) -> None:
    """The last message is continued, or nothing is opened; options may not say otherwise."""
    started = [QUESTION, {"role": "assistant", "content": "The code of mint"}]
    greedy = SamplingParams(temperature=0, max_tokens=40)
    (output,) = llm.chat(started, greedy, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == chat.render(started, continue_final_message=True)
    assert output.outputs[0].text == " is 31-94."
    (output,) = llm.chat([QUESTION], SamplingParams(max_tokens=1), add_generation_prompt=False)
    assert output.prompt == chat.render([QUESTION])
    with pytest.raises(ValueError, match=r"conversations\[0\]: .*continue_final_message are both"):
        llm.chat(started, continue_final_message=True)
    options = {"add_generation_prompt": False}
    with pytest.raises(ValueError, match=r"kwargs\.add_generation_prompt False contradicts"):
        llm.chat([QUESTION], chat_template_kwargs=options)
    same = {"add_generation_prompt": False, "continue_final_message": False}
    (again,) = llm.chat(
        [QUESTION],
        SamplingParams(max_tokens=1),
        add_generation_prompt=False,
        chat_template_kwargs=same,
    )
    assert again.prompt == output.prompt
    with pytest.raises(ValueError, match=r"chat_template_kwargs\.tools is not supported"):
        llm.chat([QUESTION], chat_template_kwargs={"tools": []})


def test_prompt_that_ends_within_a_character(llm: LLM) -> None:
    """The output has the whole character, where U+FFFD would stand once for each byte."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("€")
    assert len(ids) == 3
    prompt = {"prompt_token_ids": ids[:1]}
    forced = SamplingParams(max_tokens=1, allowed_token_ids=ids[1:2])
    (cut,) = llm.generate(prompt, forced)
    assert cut.outputs[0].text == "\ufffd"
    prompt = {"prompt_token_ids": ids[:2]}
    (whole,) = llm.generate(prompt, SamplingParams(max_tokens=1, allowed_token_ids=ids[2:]))
    assert whole.outputs[0].text == "€"


def test_bad_conversations(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by index before anything is computed, or returned with the error."""
    bad = [{"content": "x"}]
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match=r"conversations\[1\]: .*role"),
    ):
        patch.setattr(ModelRunner, "launch_prefill", lambda *_: pytest.fail("a prompt was begun"))
        llm.chat([[QUESTION], bad])
    good, refused = llm.chat([[QUESTION], bad], SamplingParams(max_tokens=2), on_error="return")
    assert good.error is None
    assert "role" in str(refused.error)
    with pytest.raises(ValueError, match="no_such_option"):
        llm.chat([QUESTION], chat_template_kwargs={"no_such_option": 1})
    assert llm.chat([]) == []


def test_requests_are_drawn_as_needed(llm: LLM) -> None:
    """A long stream of requests is not read ahead of what can wait."""
    drawn = []

    def requests():
        for number in range(40):
            drawn.append(number)
            yield PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    done = set()
    for index, output in llm.serve(requests()):
        assert output.error is None
        done.add(index)
        assert len(drawn) - len(done) <= 2 * 4
    assert done == set(range(40))
