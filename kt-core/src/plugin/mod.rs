//! Backends in shared libraries.
//!
//! A plugin is a backend as any other, built as a `cdylib` with one line more:
//!
//! ```no_run
//! use kt_core::cpu::{CpuBackend, portable::Portable, tier::Tier};
//! use kt_core::Unsupported;
//!
//! fn backend(_cap: Tier) -> Result<CpuBackend<Portable>, Unsupported> {
//!     Ok(CpuBackend::new("mine", Portable))
//! }
//! kt_core::declare_backend!("mine", backend);
//! ```
//!
//! `guest` is this side of the boundary, `host` the other one (feature `plugins`); what crosses is described in the crate
//! `kt-plugin-abi`.

pub mod guest;
#[cfg(feature = "plugins")]
mod host;
mod wire;

#[cfg(feature = "plugins")]
pub(crate) use host::candidates;
#[cfg(feature = "plugins")]
pub use host::{Plugin, Refusal, Why, list, load};

/// Calls a macro with the CPU features of x86-64 that a plugin may be compiled for and a host can look for.
#[doc(hidden)]
#[macro_export]
macro_rules! __with_cpu_features {
    ($($call:tt)+) => {
        $($call)+!(
            "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe",
            "aes", "pclmulqdq", "vaes", "vpclmulqdq", "gfni", "sha", "adx", "avxvnni", "avx512f", "avx512bw", "avx512vl",
            "avx512dq", "avx512cd", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512bitalg",
            "avx512vpopcntdq", "avx512bf16", "avx512fp16"
        )
    };
}

/// Pairs of the CPU features and whether this crate is compiled for them.
#[doc(hidden)]
#[macro_export]
macro_rules! __compiled_features {
    ($($feature:tt),*) => { &[$(($feature, cfg!(target_feature = $feature))),*] };
}

/// Makes the crate a plugin, when it is built as a `cdylib`: exports the backend that `constructor` makes under a name.
///
/// The constructor is a `fn(cap: Tier) -> Result<impl Backend, Unsupported>` that uses no instruction set above `cap`; the backend it makes has
/// the same name. For a backend that is linked into programs too, a crate or an example of its own has the line: two libraries in one program cannot
/// both export the symbol.
#[macro_export]
macro_rules! declare_backend {
    ($name:expr, $constructor:expr) => {
        #[allow(unsafe_code)] // exports a symbol, and hands pointers through
        const _: () = {
            use $crate::plugin::guest;

            unsafe extern "C" fn new(
                host: *const guest::abi::Host,
                cap: guest::abi::Text,
                backend: *mut guest::abi::Backend,
                message: *mut guest::abi::Message,
            ) -> u32 {
                // SAFETY: the host's pointers are as the ABI says.
                unsafe { guest::new_backend($name, $constructor, host, cap, backend, message) }
            }

            static TABLE: guest::abi::Table = guest::table(new);
            const COMPILED: guest::abi::Message =
                guest::compiled_for($crate::__with_cpu_features!($crate::__compiled_features));
            static FEATURES: guest::abi::Message = COMPILED;

            #[unsafe(no_mangle)]
            pub static KT_PLUGIN: guest::abi::Handshake = guest::abi::Handshake {
                magic: guest::abi::MAGIC,
                major: guest::abi::MAJOR,
                minor: guest::abi::MINOR,
                table_bytes: size_of::<guest::abi::Table>() as u64,
                unwinds: cfg!(panic = "unwind") as u32,
                reserved: 0,
                name: guest::abi::Text::new($name),
                build: guest::abi::Text::new(concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION"))),
                features: guest::abi::Text { bytes: FEATURES.bytes.as_ptr(), len: COMPILED.len as usize },
                table: &TABLE,
            };
        };
    };
}
