//! The types of `kt-plugin-abi`, from those of this crate and back.

#![allow(unsafe_code)] // reads what the other side points to
#![cfg_attr(not(feature = "plugins"), allow(dead_code))] // a host's half

use std::time::Duration;

use kt_plugin_abi as abi;

use crate::activation::Activation;
use crate::backend::{Device, Fit, Streaming};
use crate::cpu::input::{InputLayout, Sums};
use crate::error::{Error, Unsupported};
use crate::format::{Format, ScaleType};
use crate::layer::{LayerSpec, Proj};
use crate::pending::panic_text;
use crate::work::{Row, Spent};

// A row crosses as it is.
const _: () = assert!(size_of::<Row>() == size_of::<abi::Row>() && align_of::<Row>() == align_of::<abi::Row>());

/// Longest name that is read.
const NAME: usize = 256;

fn activation(rule: Activation) -> (&'static str, [f32; 2]) {
    match rule {
        Activation::SiluMul => ("silu_mul", [0.0; 2]),
        Activation::ClampedSiluMul { limit } => ("clamped_silu_mul", [limit, 0.0]),
        Activation::GptOss { alpha, limit } => ("gpt_oss", [alpha, limit]),
    }
}

fn activation_of(name: &str, [a, b]: [f32; 2]) -> Result<Activation, Unsupported> {
    match name {
        "silu_mul" => Ok(Activation::SiluMul),
        "clamped_silu_mul" => Ok(Activation::ClampedSiluMul { limit: a }),
        "gpt_oss" => Ok(Activation::GptOss { alpha: a, limit: b }),
        _ => Err(Unsupported::new(format!("unknown activation `{name}`: the host is newer than the plugin"))),
    }
}

/// The names of a layer's formats, which its description borrows; with the types of scales for whom takes them (since 1.1).
pub fn format_names(layer: &LayerSpec, with_scales: bool) -> [String; 3] {
    [0, 1, 2].map(|i| match layer.scales[i].filter(|_| with_scales) {
        Some(kind) => format!("{}@{}", layer.formats[i], scale_type(kind)),
        None => layer.formats[i].to_string(),
    })
}

pub fn layer(spec: &LayerSpec, names: &[String; 3]) -> abi::Layer {
    let (name, numbers) = activation(spec.activation);
    abi::Layer {
        index: spec.index,
        experts: spec.experts,
        top_k: spec.top_k,
        hidden: spec.hidden,
        intermediate: spec.intermediate,
        formats: [0, 1, 2].map(|i| abi::Text::new(&names[i])),
        activation: abi::Text::new(name),
        numbers,
        biases: spec.biases,
    }
}

/// # Safety
/// - The texts of `layer` are readable.
pub unsafe fn layer_of(layer: &abi::Layer) -> Result<LayerSpec, Unsupported> {
    let (mut formats, mut scales) = ([Format::F32; 3], [None; 3]);
    for (i, name) in layer.formats.into_iter().enumerate() {
        // SAFETY: promised by the caller.
        let name = unsafe { text(name) }?;
        let (format, kind) = name.split_once('@').map_or((name, None), |(format, kind)| (format, Some(kind)));
        formats[i] = format.parse()?;
        scales[i] = kind.map(scale_type_of).transpose()?;
    }
    Ok(LayerSpec {
        index: layer.index,
        experts: layer.experts,
        top_k: layer.top_k,
        hidden: layer.hidden,
        intermediate: layer.intermediate,
        formats,
        scales,
        // SAFETY: promised by the caller.
        activation: activation_of(unsafe { text(layer.activation) }?, layer.numbers)?,
        biases: layer.biases,
    })
}

/// # Safety
/// - The text is readable for as long as the result lives.
pub unsafe fn text<'a>(text: abi::Text) -> Result<&'a str, Unsupported> {
    // SAFETY: promised by the caller.
    unsafe { text.get(NAME) }.ok_or_else(|| Unsupported::new("a name is missing, too long, or not UTF-8"))
}

pub fn proj(index: u32) -> Option<Proj> {
    Proj::ALL.get(index as usize).copied()
}

const SCALE_TYPES: [(ScaleType, &str); 5] = [
    (ScaleType::F32, "F32"),
    (ScaleType::F16, "F16"),
    (ScaleType::Bf16, "BF16"),
    (ScaleType::E8m0, "E8M0"),
    (ScaleType::E4m3, "E4M3"),
];

pub fn scale_type(kind: ScaleType) -> &'static str {
    SCALE_TYPES.iter().find(|(k, _)| *k == kind).map_or("", |(_, name)| name)
}

pub fn scale_type_of(name: &str) -> Result<ScaleType, Unsupported> {
    let known = SCALE_TYPES.iter().find(|(_, n)| *n == name);
    known.map(|(k, _)| *k).ok_or_else(|| Unsupported::new(format!("unknown scale type `{name}`")))
}

fn input(layout: InputLayout) -> abi::Input {
    let none = abi::Input { kind: 0, group: 0, sums: 0, times: 0 };
    match layout {
        InputLayout::F32 => none,
        InputLayout::Bf16 => abi::Input { kind: 1, ..none },
        InputLayout::Int8 { group, sums } => {
            let (sums, times) = match sums {
                Sums::Times(times) => (0, times),
                Sums::Scaled => (1, 0),
                Sums::Halves(times) => (2, times),
                Sums::Words(times) => (3, times),
                Sums::Pairs(times) => (4, times),
                Sums::PairHalves(times) => (5, times),
                Sums::PairWords(times) => (6, times),
                Sums::PairScaled(times) => (7, times),
                Sums::TimesScaled(times) => (8, times),
            };
            abi::Input { kind: 2, group: group as u32, sums, times }
        }
        InputLayout::Int8Words { group, zero, minima } => {
            abi::Input { kind: 3, group: group as u32, sums: minima.into(), times: zero }
        }
    }
}

fn input_of(input: abi::Input) -> Option<InputLayout> {
    Some(match (input.kind, input.group, input.sums) {
        (0, ..) => InputLayout::F32,
        (1, ..) => InputLayout::Bf16,
        (2, group @ (16 | 32 | 128 | 512), sums) => {
            let sums = match sums {
                0 => Sums::Times(input.times),
                1 => Sums::Scaled,
                2 => Sums::Halves(input.times),
                3 => Sums::Words(input.times),
                4 => Sums::Pairs(input.times),
                5 => Sums::PairHalves(input.times),
                6 => Sums::PairWords(input.times),
                7 => Sums::PairScaled(input.times),
                8 => Sums::TimesScaled(input.times),
                _ => return None,
            };
            InputLayout::Int8 { group: group as usize, sums }
        }
        (3, group @ (16 | 32), minima @ (0 | 1)) if input.times > 0 => {
            InputLayout::Int8Words { group: group as usize, zero: input.times, minima: minima == 1 }
        }
        _ => return None,
    })
}

pub fn fit(fit: &Fit) -> abi::Fit {
    let mut wire = abi::Fit {
        rank: fit.rank,
        inputs: fit.inputs.map(input),
        packed_bytes: fit.packed_bytes,
        mapped_bytes: fit.mapped_bytes,
        scratch_bytes_per_token: fit.scratch_bytes_per_token,
        tier: abi::Words::EMPTY,
        how: abi::Words::EMPTY,
    };
    wire.tier.set(&fit.tier);
    wire.how.set(&fit.how);
    wire
}

/// Highest rank that a plugin may give itself: far above those of instruction sets, which are their places in [`crate::cpu::tier::Tier::ALL`].
pub const MAX_RANK: u32 = 1000;

/// A plugin's word for weights of which the checkpoint has `stored` bytes, or what about it cannot be.
pub fn fit_of(fit: &abi::Fit, stored: u64) -> Result<Fit, String> {
    // F32 for ternary weights is 20 times as much; rows and panels are padded.
    let most = stored.saturating_mul(64).saturating_add(16 << 20);
    if fit.rank > MAX_RANK {
        return Err(format!("rank {}; at most {MAX_RANK} is possible", fit.rank));
    }
    for (what, bytes) in [("packed", fit.packed_bytes), ("mapped", fit.mapped_bytes)] {
        if bytes > most {
            return Err(format!("{bytes} bytes {what}, of weights that are {stored} in the checkpoint"));
        }
    }
    if fit.scratch_bytes_per_token > 1 << 32 {
        return Err(format!("{} bytes of scratch per token", fit.scratch_bytes_per_token));
    }
    let [Some(first), Some(second)] = fit.inputs.map(input_of) else {
        return Err("a rounding of inputs that this host does not know".into());
    };
    let tier = fit.tier.get().filter(|t| !t.is_empty()).ok_or("no readable tier")?;
    let how = fit.how.get().filter(|t| !t.is_empty()).ok_or("no readable description")?;
    Ok(Fit {
        rank: fit.rank,
        tier: tier.into(),
        how: how.into(),
        packed_bytes: fit.packed_bytes,
        mapped_bytes: fit.mapped_bytes,
        scratch_bytes_per_token: fit.scratch_bytes_per_token,
        inputs: [first, second],
    })
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

pub fn device(device: &Device) -> abi::Device {
    let mut wire = abi::Device {
        label: abi::Words::EMPTY,
        total_bytes: device.total_bytes,
        free_bytes: device.free_bytes,
        read_bytes_per_second: device.read_bytes_per_second.unwrap_or(0.0),
        call: nanos(device.call),
    };
    wire.label.set(&device.label);
    wire
}

/// A plugin's word for its device, or what about it cannot be.
pub fn device_of(device: &abi::Device) -> Result<Device, String> {
    let label = device.label.get().filter(|l| !l.is_empty()).ok_or("no readable label of its device")?;
    if device.free_bytes > device.total_bytes {
        return Err(format!("{} bytes free of a device of {}", device.free_bytes, device.total_bytes));
    }
    let rate = device.read_bytes_per_second;
    if !(0.0..1e18).contains(&rate) {
        return Err(format!("a device that reads {rate} bytes per second"));
    }
    let call = Duration::from_nanos(device.call);
    if call > Duration::from_secs(60) {
        return Err(format!("a device whose calls cost {call:?}"));
    }
    Ok(Device {
        label: label.into(),
        total_bytes: device.total_bytes,
        free_bytes: device.free_bytes,
        read_bytes_per_second: (rate > 0.0).then_some(rate),
        call,
    })
}

pub fn streaming(streaming: Streaming) -> abi::Streaming {
    abi::Streaming { device_bytes: streaming.device_bytes, host_bytes: streaming.host_bytes }
}

/// A plugin's word for what streaming takes, or what about it cannot be.
pub fn streaming_of(streaming: abi::Streaming) -> Result<Streaming, String> {
    let abi::Streaming { device_bytes, host_bytes } = streaming;
    match device_bytes.max(host_bytes) > 1 << 48 {
        true => Err(format!("{device_bytes} bytes of the device and {host_bytes} of the host to stream through")),
        false => Ok(Streaming { device_bytes, host_bytes }),
    }
}

pub fn spent(spent: Spent) -> abi::Spent {
    abi::Spent { kernels: nanos(spent.kernels), waiting: nanos(spent.waiting) }
}

/// A failure's code, and its words for the other side, which says itself which backend and layer it was.
pub fn failure(error: &Error) -> (u32, String) {
    let code = match error {
        Error::Unsupported(_) => abi::UNSUPPORTED,
        Error::Cancelled => abi::CANCELLED,
        Error::Backend { what, .. } => return (abi::FAILED, what.clone()),
        _ => abi::FAILED,
    };
    (code, error.to_string())
}

/// Runs `f` for the other side: its error, or its panic, is written into the message.
///
/// # Safety
/// - `message` is null, or points to a message that nobody else uses.
pub unsafe fn answer(message: *mut abi::Message, f: impl FnOnce() -> Result<(), Error>) -> u32 {
    let (code, words) = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)) {
        Ok(Ok(())) => return abi::DONE,
        Ok(Err(error)) => failure(&error),
        Err(payload) => {
            let words = panic_text(&*payload);
            // What a panic carries may panic when it is dropped.
            std::mem::forget(payload);
            (abi::PANICKED, words)
        }
    };
    // SAFETY: promised by the caller.
    if let Some(message) = unsafe { message.as_mut() } {
        message.set(&words);
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_come_back_with_the_types_of_their_scales() {
        let layer = LayerSpec {
            index: 3,
            experts: 9,
            top_k: 2,
            hidden: 96,
            intermediate: 64,
            formats: [Format::Int4(crate::format::Group::Of(32)), Format::Bf16, Format::Fp8Channel],
            scales: [Some(ScaleType::F32), None, Some(ScaleType::Bf16)],
            activation: Activation::GptOss { alpha: 1.5, limit: 7.0 },
            biases: true,
        };
        for (with_scales, scales) in [(true, layer.scales), (false, [None; 3])] {
            let names = format_names(&layer, with_scales);
            // SAFETY: the texts are of `names`, which live.
            let back = unsafe { layer_of(&super::layer(&layer, &names)) }.unwrap();
            assert_eq!(back, LayerSpec { scales, ..layer.clone() });
        }
        let names = ["INT4-g32@E5M2", "BF16", "BF16"].map(String::from);
        // SAFETY: as above.
        let why = unsafe { layer_of(&super::layer(&layer, &names)) }.unwrap_err().0;
        assert!(why.contains("E5M2"), "{why}");
    }

    #[test]
    fn roundings_of_inputs_come_back_as_they_went() {
        let mut all = vec![InputLayout::F32, InputLayout::Bf16];
        for group in [16, 32, 128, 512] {
            for sums in [
                Sums::Times(-8),
                Sums::Times(1),
                Sums::Scaled,
                Sums::Halves(-32),
                Sums::Words(-8),
                Sums::Pairs(-16),
                Sums::PairHalves(-4),
                Sums::PairWords(-8),
                Sums::PairScaled(-16),
                Sums::TimesScaled(-128),
            ] {
                all.push(InputLayout::Int8 { group, sums });
            }
        }
        all.push(InputLayout::Int8Words { group: 16, zero: 12, minima: false });
        all.push(InputLayout::Int8Words { group: 32, zero: 8, minima: true });
        for layout in all {
            assert_eq!(input_of(input(layout)), Some(layout));
        }
        let known = abi::Input { kind: 2, group: 32, sums: 0, times: 1 };
        for unknown in
            [abi::Input { kind: 4, ..known }, abi::Input { group: 64, ..known }, abi::Input { sums: 9, ..known }]
        {
            assert_eq!(input_of(unknown), None);
        }
    }
}
