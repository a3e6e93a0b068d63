"""transformers: `generate`, eager attention (the only one its class for this model has)."""

import channel
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    config = channel.config()
    torch.set_num_threads(config["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        config["model"], dtype=getattr(torch, config["dtype"]), attn_implementation="eager"
    ).eval()

    @torch.inference_mode()
    def generate(ids: list[list[int]], num_tokens: int) -> list[list[int]]:
        prompt = torch.tensor(ids)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        new: list[list[int]] = output[:, prompt.shape[1] :].tolist()
        return new

    channel.serve(generate)


if __name__ == "__main__":
    main()
