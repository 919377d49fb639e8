"""Tiny random models of the tasks that pipelines of transformers answer."""

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.images import SIZES, SQUARE, made
from tests.support.serving_kit import tokenizer

SPOKEN = np.sin(np.arange(8_000) / 9).astype(np.float32) / 2
"""Half a second at 16,000 Hz."""


def sound(samples: Any = SPOKEN, rate: int = 16_000, channels: int = 1, width: int = 2) -> bytes:
    """Return samples as WAV, the same in each channel."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes((np.repeat(samples, channels) * 32767).astype("<i2").tobytes())
    return out.getvalue()


WAV = sound()
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 4), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "initializer_range": 0.3,
}  # fmt: skip


def save_features(folder: Path) -> None:
    """Save the feature extractor of raw audio."""
    made.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)


def save_audio_classifier(folder: Path) -> None:
    made.Wav2Vec2ForSequenceClassification(
        made.Wav2Vec2Config(num_labels=7, classifier_proj_size=16, **SMALL)
    ).save_pretrained(folder)
    save_features(folder)


def save_ctc(folder: Path) -> None:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    made.Wav2Vec2ForCTC(
        made.Wav2Vec2Config(vocab_size=len(letters), pad_token_id=0, **SMALL)
    ).save_pretrained(folder)
    save_features(folder)
    (folder / "vocab.json").write_text(json.dumps({c: n for n, c in enumerate(letters)}))
    made.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)


def save_speech_to_text(folder: Path) -> None:
    """Save an encoder-decoder of speech (Whisper's)."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120"]
    reader = made.WhisperTokenizer(
        vocab={c: n for n, c in enumerate(letters)}, merges=[],
        additional_special_tokens=["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"],
    )  # fmt: skip
    config = made.WhisperConfig(
        vocab_size=len(reader), d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, decoder_ffn_dim=16, num_mel_bins=80,
        max_source_positions=1500, max_target_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=reader.eos_token_id, decoder_start_token_id=2, init_std=0.3, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = made.WhisperForConditionalGeneration(config)
    model.generation_config.max_length = 60
    model.save_pretrained(folder)
    made.WhisperFeatureExtractor().save_pretrained(folder)
    reader.save_pretrained(folder)


def drop_types(folder: Path) -> None:
    """Make the saved tokenizer one without types of tokens, as RoBERTa's."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "model_input_names": ["input_ids", "attention_mask"]}))


def save_clap(folder: Path) -> None:
    reader = tokenizer()
    config = made.ClapConfig(
        text_config={"vocab_size": len(reader), "max_position_embeddings": 64, "pad_token_id": 0, **SIZES},
        audio_config={
            "spec_size": 256, "patch_size": 4, "window_size": 8, "hidden_size": 32, "depths": [1, 1],
            "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 16, "num_hidden_layers": 2,
        },
        projection_dim=16,
    )  # fmt: skip
    made.ClapModel(config).save_pretrained(folder)
    made.ClapFeatureExtractor(sampling_rate=16_000, truncation="rand_trunc").save_pretrained(folder)
    reader.save_pretrained(folder)
    drop_types(folder)


def save_vits(folder: Path) -> None:
    letters = [*"abcdefghijklmnopqrstuvwxyz '", "<pad>"]
    config = made.VitsConfig(
        vocab_size=len(letters), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ffn_dim=16, flow_size=16, spectrogram_bins=9, prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1,
        upsample_initial_channel=16, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]], duration_predictor_num_flows=1,
        duration_predictor_filter_channels=16, wavenet_dilation_rate=1, sampling_rate=16_000,
    )  # fmt: skip
    made.VitsModel(config).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({c: n for n, c in enumerate(letters)}))
    made.VitsTokenizer(
        str(folder / "vocab.json"), pad_token="<pad>", phonemize=False, is_uroman=False
    ).save_pretrained(folder)


def save_tapas(folder: Path) -> None:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[EMPTY]",
        *"abcdefghijklmnopqrstuvwxyz0123456789",
    ]
    words += [f"##{letter}" for letter in words[6:]]
    (folder / "vocab.txt").write_text("\n".join(words))
    config = made.TapasConfig(
        vocab_size=len(words), max_position_embeddings=64, type_vocab_sizes=[3, 32, 32, 2, 32, 10, 10],
        num_aggregation_labels=4, aggregation_labels={0: "NONE", 1: "SUM", 2: "AVERAGE", 3: "COUNT"},
        initializer_range=0.5, **SIZES,
    )  # fmt: skip
    made.TapasForQuestionAnswering(config).save_pretrained(folder)
    made.TapasTokenizer(str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)


def save_layoutlm(folder: Path) -> None:
    reader = tokenizer()
    config = made.LayoutLMConfig(
        vocab_size=len(reader), max_position_embeddings=48, initializer_range=0.3, **SIZES
    )
    made.LayoutLMForQuestionAnswering(config).save_pretrained(folder)
    reader.save_pretrained(folder)


def save_vilt(folder: Path) -> None:
    reader = tokenizer()
    config = made.ViltConfig(
        vocab_size=len(reader), max_position_embeddings=48, image_size=32, patch_size=8, num_labels=6,
        initializer_range=0.3, **SIZES,
    )  # fmt: skip
    made.ViltForQuestionAnswering(config).save_pretrained(folder)
    made.ViltImageProcessorPil(size={"shortest_edge": 32}).save_pretrained(folder)
    reader.save_pretrained(folder)


def save_blip(folder: Path, kind: str = "BlipForQuestionAnswering") -> None:
    reader = tokenizer()
    config = made.BlipConfig(
        text_config={
            "vocab_size": len(reader), "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 3,
            "sep_token_id": 3, "pad_token_id": 0, "encoder_hidden_size": 32, "initializer_range": 0.3, **SIZES,
        },
        vision_config={"image_size": 32, "patch_size": 8, **SIZES}, projection_dim=16,
        image_text_hidden_size=32,
    )  # fmt: skip
    getattr(made, kind)(config).save_pretrained(folder)
    images = made.BlipImageProcessorPil(size=SQUARE)
    made.BlipProcessor(image_processor=images, tokenizer=reader).save_pretrained(folder)
    drop_types(folder)


def save_captioner(folder: Path) -> None:
    """Save a vision encoder with a text decoder."""
    reader = tokenizer()
    made.VisionEncoderDecoderModel(
        made.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            made.ViTConfig(image_size=32, patch_size=8, **SIZES),
            made.GPT2Config(
                vocab_size=len(reader), n_embd=32, n_layer=1, n_head=2, n_positions=64,
                bos_token_id=2, eos_token_id=3, initializer_range=0.3,
            ),
            decoder_start_token_id=2, pad_token_id=0, eos_token_id=3,
        )
    ).save_pretrained(folder)  # fmt: skip
    made.ViTImageProcessorPil(size=SQUARE).save_pretrained(folder)
    reader.save_pretrained(folder)


def save_upscaler(folder: Path) -> None:
    config = made.Swin2SRConfig(
        image_size=32, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, upscale=2,
        initializer_range=0.3,
    )  # fmt: skip
    made.Swin2SRForImageSuperResolution(config).save_pretrained(folder)
    made.Swin2SRImageProcessorPil(pad_size=4).save_pretrained(folder)


def save_depth(folder: Path) -> None:
    config = made.DPTConfig(
        image_size=32, patch_size=8, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16] * 4,
        fusion_hidden_size=16, **{**SIZES, "num_hidden_layers": 4},
    )  # fmt: skip
    made.DPTForDepthEstimation(config).save_pretrained(folder)
    made.DPTImageProcessorPil(size=SQUARE).save_pretrained(folder)


def save_owl(folder: Path) -> None:
    reader = tokenizer()
    reader.model_max_length = 16
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = made.OwlViTConfig(
        text_config={"vocab_size": len(reader), "max_position_embeddings": 16, **ids, **SIZES},
        vision_config={"image_size": 32, "patch_size": 8, **SIZES}, projection_dim=32,
    )  # fmt: skip
    made.OwlViTForObjectDetection(config).save_pretrained(folder)
    made.OwlViTImageProcessorPil(size=SQUARE, do_center_crop=False).save_pretrained(folder)
    reader.save_pretrained(folder)


def save_sam(folder: Path) -> None:
    config = made.SamConfig(
        vision_config={
            "image_size": 32, "patch_size": 8, "output_channels": 8, "window_size": 2, "mlp_dim": 64,
            "global_attn_indexes": [1], "num_pos_feats": 4, **SIZES,
        },
        prompt_encoder_config={"hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 8, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 8},
    )  # fmt: skip
    made.SamModel(config).save_pretrained(folder)
    made.SamImageProcessorPil(
        size={"longest_edge": 32}, pad_size=SQUARE, mask_size={"longest_edge": 8},
        mask_pad_size={"height": 8, "width": 8},
    ).save_pretrained(folder)  # fmt: skip


def save_matcher(folder: Path) -> None:
    points = made.SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 8, 8], decoder_hidden_size=8, keypoint_decoder_dim=65,
        descriptor_decoder_dim=16, keypoint_threshold=0.0, max_keypoints=12,
    )  # fmt: skip
    config = made.SuperGlueConfig(
        keypoint_detector_config=points, hidden_size=16, keypoint_encoder_sizes=[16],
        gnn_layers_types=["self", "cross"], num_attention_heads=2, sinkhorn_iterations=2,
        matching_threshold=0.0,
    )  # fmt: skip
    made.SuperGlueForKeypointMatching(config).save_pretrained(folder)
    made.SuperGlueImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)


def save_video_classifier(folder: Path) -> None:
    config = made.VideoMAEConfig(
        image_size=32, patch_size=8, num_frames=4, tubelet_size=2, num_labels=4, **SIZES
    )
    made.VideoMAEForVideoClassification(config).save_pretrained(folder)
    made.VideoMAEImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE).save_pretrained(
        folder
    )
