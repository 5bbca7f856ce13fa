"""transformers' ``generate`` with the backend: over a KiviCache (no float cache at all), and over the model's own StaticCache.

    python examples/transformers_generate.py                                      # a small random Llama
    python examples/transformers_generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --prompt "The tide rises because"

Prints the tokens of a float cache, of a KiviCache and of a StaticCache, and what each held.
"""

import argparse
import inspect

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

from kivi_ops import KiviCache, KiviConfig
from kivi_ops.passes import last_report


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def compile_config(**options: object) -> CompileConfig:
    # transformers would hand its own mode= on, which torch.compile refuses beside options=; the backend takes options={"mode": ...} too.
    config = CompileConfig(backend="kivi", fullgraph=True, mode=None, options=options)
    config._compile_all_devices = True  # else generate compiles on accelerators only
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's name; a small random one if left out")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--compiler", default="inductor", help="what compiles the rewritten graph")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model).to(device).eval()
        inputs = AutoTokenizer.from_pretrained(options.model)(options.prompt, return_tensors="pt").to(device)
    else:
        model = small_llama().to(device)
        ids = torch.arange(20, device=device)[None] * 5 % 128
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompt = inputs["input_ids"].shape[1]
    capacity = prompt + options.new_tokens
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # by transformers' version
    bits = {"key_bits": options.bits, "value_bits": options.bits}

    def tokens(**more: object) -> list[int]:
        output = model.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False, **more)
        return output[0, prompt:].tolist()

    print("float cache ", tokens())

    # The KiviCache says how it is quantised; the backend needs to be told nothing. There is no float cache.
    kivi = KiviCache.for_model(model, max_cache_len=capacity, config=KiviConfig(**bits))
    print("KiviCache   ", tokens(**{name: kivi}, compile_config=compile_config(compiler=options.compiler, strict=True)))
    print(f"             {kivi.held_bytes()} bytes, {last_report().summary}")

    # The model's own cache stays, with a quantised state beside it: less to read in every step, not less memory.
    static = StaticCache(config=model.config, max_cache_len=capacity)
    print("StaticCache ", tokens(**{name: static}, compile_config=compile_config(compiler=options.compiler, strict=True, **bits)))
    print(f"             {last_report().summary}")


if __name__ == "__main__":
    main()
