//! Options that several commands share.

use kt::cpu::tier::Tier;

/// Which runtime to build.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RuntimeArgs {
    /// Threads to compute with [default: the CPUs that this process may use].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Use only this backend [default: the best for each layer].
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Use no instruction set above this one: portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx.
    #[arg(long, value_name = "TIER")]
    pub isa: Option<Tier>,
    /// Most tokens that go through a layer of experts at once: fewer take less scratch, and read the experts more often [default: 1024].
    #[arg(long, value_name = "N")]
    pub pass_tokens: Option<usize>,
}

impl RuntimeArgs {
    /// Builds it.
    ///
    /// # Errors
    /// The named backend does not exist or cannot run here.
    pub fn build(&self) -> kt::Result<kt::Runtime> {
        let mut builder = kt::runtime();
        if let Some(threads) = self.threads {
            builder = builder.threads(threads);
        }
        if let Some(backend) = &self.backend {
            builder = builder.backend(backend);
        }
        if let Some(tier) = self.isa {
            builder = builder.max_tier(tier);
        }
        if let Some(tokens) = self.pass_tokens {
            builder = builder.pass_tokens(tokens);
        }
        builder.build()
    }
}

/// `1 thread`, `2 threads`.
pub fn threads_text(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}
