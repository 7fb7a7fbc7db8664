//! Which instruction sets this process may use.

use std::fmt;

/// Instruction sets, from the one that is always there upwards. A tier implies those below it, except that [`Tier::AvxVnni`] and
/// the AVX-512 tiers are independent of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Tier {
    /// Plain Rust, any architecture.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2 with 256-bit VNNI.
    AvxVnni,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// and VNNI.
    Avx512Vnni,
    /// and BF16 and VBMI.
    Avx512Bf16,
    /// and the tile unit with int8 and bf16, as far as the operating system grants it.
    Amx,
}

impl Tier {
    /// All tiers, lowest first.
    pub const ALL: [Tier; 7] =
        [Tier::Portable, Tier::Avx2, Tier::AvxVnni, Tier::Avx512, Tier::Avx512Vnni, Tier::Avx512Bf16, Tier::Amx];

    /// `portable`, `avx2`, …
    pub fn name(self) -> &'static str {
        match self {
            Tier::Portable => "portable",
            Tier::Avx2 => "avx2",
            Tier::AvxVnni => "avxvnni",
            Tier::Avx512 => "avx512",
            Tier::Avx512Vnni => "avx512vnni",
            Tier::Avx512Bf16 => "avx512bf16",
            Tier::Amx => "amx",
        }
    }

    /// Whether this CPU (and its operating system) can run the tier's instructions.
    pub fn available(self) -> bool {
        self.missing().is_empty()
    }

    /// The CPU features that the tier needs and this CPU lacks; for [`Tier::Amx`] also what the operating system does not grant, which it
    /// is asked for once ([`amx::permission`](super::amx::permission)).
    pub fn missing(self) -> Vec<&'static str> {
        let mut missing = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            macro_rules! need {
                ($($f:tt),*) => { $( if !std::arch::is_x86_feature_detected!($f) { missing.push($f); } )* };
            }
            if self >= Tier::Avx2 {
                need!("avx2", "fma", "f16c");
            }
            if self == Tier::AvxVnni {
                need!("avxvnni");
            }
            if self >= Tier::Avx512 {
                need!("avx512f", "avx512bw", "avx512vl", "avx512dq");
            }
            if self >= Tier::Avx512Vnni {
                need!("avx512vnni");
            }
            if self >= Tier::Avx512Bf16 {
                need!("avx512bf16", "avx512vbmi");
            }
            if self == Tier::Amx {
                missing.extend(super::amx::permission().err().iter().flat_map(super::amx::Refusal::missing));
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        if self != Tier::Portable {
            missing.push("x86-64");
        }
        missing
    }

    /// The highest tier this CPU has, at most `cap`.
    pub fn detect(cap: Tier) -> Tier {
        *Tier::ALL.iter().rev().find(|&&t| t <= cap && t.available()).unwrap_or(&Tier::Portable)
    }

    /// The tiers up to `cap` that this CPU has.
    pub fn all_available(cap: Tier) -> Vec<Tier> {
        Tier::ALL.into_iter().filter(|&t| t <= cap && t.available()).collect()
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Tier {
    type Err = crate::Unsupported;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Tier::ALL.into_iter().find(|t| t.name() == s.to_ascii_lowercase()).ok_or_else(|| {
            let known: Vec<_> = Tier::ALL.iter().map(|t| t.name()).collect();
            crate::Unsupported::new(format!("unknown tier `{s}`; known are {}", known.join(" ")))
        })
    }
}
