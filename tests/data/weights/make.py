"""Makes the folders beside it, in which torch's libraries say what a file of weights computes.

    PYTHONPATH=.:tests/support:tests/models python tests/data/weights/make.py

With transformers (5.24.0, torch 2.13.0): ``gpt2*`` and ``llama*`` are models that it initialized,
spread and saved; ``marian`` and ``pegasus`` hold our export of the parameters that the tests draw,
as it read it, with position tables cut to 16 rows. With torchvision (0.28.0):
``resnet`` holds logits of its resnet18 and resnet50 around our export. All are float32.
"""

import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 16))


def spread(model):
    """Larger weights, so that attention and positions matter."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def decoders():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    gpt2 = {"vocab_size": 24, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    llama = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    of_llama_3 = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    of_llama_3["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    torch.manual_seed(0)
    for name, model in {
        "gpt2": GPT2LMHeadModel(GPT2Config(**gpt2)),
        "gpt2_untied": GPT2LMHeadModel(GPT2Config(**gpt2, tie_word_embeddings=False)),
        "llama_2": LlamaForCausalLM(LlamaConfig(**llama)),  # 10000, 1e-6, untied
        "llama_3": LlamaForCausalLM(LlamaConfig(**llama, **of_llama_3)),
    }.items():
        spread(model).save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits.numpy()
        np.savez(HERE / name / "logits.npz", tokens=TOKENS, logits=logits)


def translators():
    from test_transformer_weights import SOURCE, TARGET_IN, saved
    from transformers import AutoModelForSeq2SeqLM

    from decent_jax.models import hf_config

    for name, norm in (("marian", "post"), ("pegasus", "pre")):
        with tempfile.TemporaryDirectory() as folder:
            config, _, tensors = saved(Path(folder), norm)
            described = json.dumps(hf_config.describe(config))
            (Path(folder) / "config.json").write_text(described)
            model, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor(SOURCE),
                attention_mask=torch.tensor(SOURCE != 0),
                decoder_input_ids=torch.tensor(TARGET_IN),
            ).logits.numpy()
        cut = {key: x[:16] if "positions" in key else x for key, x in tensors.items()}
        (HERE / name).mkdir(exist_ok=True)
        np.savez(HERE / name / "export.npz", **cut, logits=logits)
        (HERE / name / "config.json").write_text(described + "\n")


def resnets():
    import torchvision
    from safetensors.torch import load_file
    from test_resnet_weights import IMAGES, random_model

    from decent_jax.models import resnet, weights

    logits = {}
    for name in ("resnet18", "resnet50"):
        config = resnet.PRESETS[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            weights.save_resnet(path, *random_model(config, spread=0.05), config, 0, {})
            model = getattr(torchvision.models, name)()
            model.load_state_dict(load_file(path), strict=True)
        with torch.no_grad():
            images = torch.tensor(IMAGES).permute(0, 3, 1, 2)
            logits[name] = model.eval()(images)[:, :8].numpy()
    (HERE / "resnet").mkdir(exist_ok=True)
    np.savez(HERE / "resnet" / "logits.npz", **logits)


if __name__ == "__main__":
    if importlib.util.find_spec("transformers"):
        decoders()
        translators()
    if importlib.util.find_spec("torchvision"):
        resnets()
