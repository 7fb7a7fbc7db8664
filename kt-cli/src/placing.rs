//! Options that put experts on devices.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail};
use kt::HeatMap;
use kt::Runtime;
use kt::placement::{Capacity, PlacementOptions, Policy, Stream};

use crate::convert::parse_size;

/// A [`Policy`] as an option; a heat map is read when it is used.
#[derive(Debug, Clone, PartialEq)]
enum PolicyArg {
    Plain(Policy),
    Frequency(PathBuf),
}

impl FromStr for PolicyArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("frequency:") {
            Some("") => Err("name the heat map: frequency:FILE.json, as `kt run --heatmap FILE.json` writes it".into()),
            Some(path) => Ok(PolicyArg::Frequency(path.into())),
            None if text == "frequency" => PolicyArg::from_str("frequency:"),
            None => text.parse().map(PolicyArg::Plain).map_err(|e: kt::Error| format!("{e}: frequency:FILE.json")),
        }
    }
}

fn stream(text: &str) -> Result<Stream, String> {
    match text {
        "never" => Ok(Stream::Never),
        "auto" => Ok(Stream::Measured),
        _ => text.parse().map(Stream::From).map_err(|_| "a number of tokens, `auto` or `never`".into()),
    }
}

/// Which experts go to GPUs, and when.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PlacementArgs {
    /// Memory of GPUs for experts, e.g. 20GiB; of several, one number each, in their order.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = parse_size)]
    pub gpu_budget: Vec<u64>,
    /// Experts of each layer on each GPU, as far as they find room [default: what the budget holds].
    #[arg(long, value_name = "N")]
    pub gpu_experts: Option<usize>,
    /// Which experts go there: uniform, front-loading, random:SEED, or frequency:FILE by a heat map [default: uniform].
    #[arg(long, value_name = "POLICY")]
    placement: Option<PolicyArg>,
    /// Move experts while the model runs: those that are chosen often to GPUs, others back.
    #[arg(long)]
    pub live: bool,
    /// Stream whole layers to the first GPU for passes of so many tokens and more: a number, `auto` to measure it at load, or `never`.
    #[arg(long, value_name = "TOKENS", value_parser = stream)]
    gpu_prefill_threshold: Option<Stream>,
}

impl PlacementArgs {
    /// Which experts go where, on the devices that this runtime has.
    ///
    /// # Errors
    /// Devices are asked for and there is none, the reason given where a backend for them is there; a heat map that cannot be read.
    pub fn options(&self, runtime: &Runtime) -> Result<PlacementOptions> {
        let policy = match &self.placement {
            None => Policy::default(),
            Some(PolicyArg::Plain(policy)) => policy.clone(),
            Some(PolicyArg::Frequency(path)) => Policy::Frequency(HeatMap::load(path)?),
        };
        let stream = self.gpu_prefill_threshold.unwrap_or_default();
        let wanted = !self.gpu_budget.is_empty() || self.gpu_experts.is_some();
        if !wanted && stream == Stream::Never {
            if self.live || self.placement.is_some() {
                bail!(
                    "--placement and --live need --gpu-budget BYTES or --gpu-experts N: without, no expert is on a GPU"
                );
            }
            return Ok(PlacementOptions::default());
        }
        let is_device = |c: &&kt::Candidate| c.backend.as_ref().is_ok_and(|b| b.device().is_some());
        let devices: Vec<&kt::Candidate> = runtime.candidates().iter().filter(is_device).collect();
        if devices.is_empty() {
            let why = |c: &kt::Candidate| c.backend.as_ref().err().map(|why| format!("; {}: {why}", c.name));
            // Those that run on CPUs, and why they do not, are of no interest here.
            const CPU: [&str; 5] = ["amx", "avx512", "llamafile", "blis", "portable"];
            let for_gpus = runtime.candidates().iter().filter(|c| !CPU.contains(&c.name.as_str()));
            let reasons: String = for_gpus.filter_map(why).collect();
            let build =
                if cfg!(feature = "cuda") { "" } else { "; this build has none for GPUs: build with --features cuda" };
            bail!("no GPU that experts could go to{reasons}{build}");
        }
        if self.gpu_budget.len() > devices.len() {
            bail!("--gpu-budget has {} numbers, and there are {} GPUs", self.gpu_budget.len(), devices.len());
        }
        let capacity = |i: usize| Capacity {
            bytes: match self.gpu_budget.get(i) {
                Some(&bytes) => bytes,
                // With a number of experts alone, as many as find room.
                None if self.gpu_budget.is_empty() && wanted => u64::MAX,
                None => 0,
            },
            experts_per_layer: self.gpu_experts.unwrap_or(usize::MAX),
        };
        let devices = devices.iter().enumerate().map(|(i, c)| (c.name.clone(), capacity(i))).collect();
        Ok(PlacementOptions { devices, policy, live: self.live, stream })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_and_thresholds_are_read() {
        assert_eq!("uniform".parse(), Ok(PolicyArg::Plain(Policy::Uniform)));
        assert_eq!("random:3".parse(), Ok(PolicyArg::Plain(Policy::Random(3))));
        assert_eq!("frequency:a.json".parse(), Ok(PolicyArg::Frequency("a.json".into())));
        assert!("frequency".parse::<PolicyArg>().unwrap_err().contains("name the heat map"));
        assert!("hottest".parse::<PolicyArg>().unwrap_err().contains("there are: uniform"));
        assert_eq!((stream("never"), stream("auto")), (Ok(Stream::Never), Ok(Stream::Measured)));
        assert_eq!(stream("512"), Ok(Stream::From(512)));
        assert!(stream("-1").is_err());
    }

    #[test]
    fn without_a_gpu_the_reasons_are_told() {
        let runtime = kt::runtime().build().unwrap();
        let args = PlacementArgs { gpu_experts: Some(3), ..Default::default() };
        if !runtime.candidates().iter().any(|c| c.backend.as_ref().is_ok_and(|b| b.device().is_some())) {
            let why = args.options(&runtime).unwrap_err().to_string();
            assert!(why.starts_with("no GPU that experts could go to") && !why.contains("amx"), "{why}");
        }
        let args = PlacementArgs { live: true, ..Default::default() };
        assert!(args.options(&runtime).unwrap_err().to_string().contains("need --gpu-budget"));
        assert!(PlacementArgs::default().options(&runtime).unwrap().devices.is_empty());
    }
}
