//! Options that several commands share.

use std::path::PathBuf;
use std::time::Duration;

use kt::cpu::cache::CacheReport;
use kt::cpu::memory::HugePages;
use kt::cpu::team::{Pin, Team};
use kt::cpu::tier::Tier;

/// [`Pin`] as an option.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PinArg {
    /// To the CPUs of their NUMA node, where there are several nodes.
    #[default]
    Node,
    /// Each to one CPU.
    Cpu,
    /// To none.
    No,
}

/// [`HugePages`] as an option.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum HugePagesArg {
    /// The system's usual pages.
    No,
    /// Transparent huge pages, where the system gives them.
    #[default]
    Transparent,
    /// Reserved pages of 2 MiB while they last, else transparent ones.
    Reserved,
}

/// Which runtime to build.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RuntimeArgs {
    /// Threads to compute with, no more than a CPU quota pays for [default: the physical cores that this process may use; encoders of `kt convert`: all CPUs].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Use only these NUMA nodes, e.g. 0,1 [default: all].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub nodes: Option<Vec<usize>>,
    /// Keep threads to their node, each to one CPU, or to none.
    #[arg(long, value_enum, value_name = "WHERE", default_value_t)]
    pub pin: PinArg,
    /// Microseconds that a thread without work spins before it sleeps [default: 60].
    #[arg(long, value_name = "US")]
    pub spin: Option<u64>,
    /// Pages for packed weights.
    #[arg(long, value_enum, value_name = "KIND", default_value_t)]
    pub huge_pages: HugePagesArg,
    /// Use only this backend [default: the best for each layer].
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// The library of the backend blis, AOCL-DLP, AOCL-BLAS or BLIS, by its path or name [default: the first that is found].
    #[cfg(feature = "blis")]
    #[arg(long, value_name = "PATH")]
    pub blis: Option<std::path::PathBuf>,
    /// Load the backend of this plugin too, or those of all plugins of this directory; may be given several times. Loading one runs its code.
    #[cfg(feature = "plugins")]
    #[arg(long, value_name = "PATH")]
    pub plugin: Vec<std::path::PathBuf>,
    /// Use no instruction set above this one: portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx.
    #[arg(long, value_name = "TIER")]
    pub isa: Option<Tier>,
    /// Most tokens that go through a layer of experts at once: fewer take less scratch, and read the experts more often [default: as many as give an expert 256 rows on average, 1024 to 6144]. Prompts of `kt run` and `kt eval` come in pieces of at most that, and of at most 2048 tokens, or 512 where so many do not fit into memory.
    #[arg(long, value_name = "N")]
    pub pass_tokens: Option<usize>,
    /// Use weights from the file's map wherever a kernel can, even where packing makes it faster: IQ1, IQ2 and IQ3. Without this, only experts
    /// that find no room when they are packed.
    #[arg(long)]
    pub in_place: bool,
    /// Give a token the same numbers whatever else is in a call, where a backend has a faster way for many tokens that rounds otherwise: amx, and avx512 and llamafile
    /// for some formats with scales of groups.
    #[arg(long)]
    pub batch_invariant: bool,
    /// Keep packed experts in this directory: the first load writes them, later ones map them. May be deleted at any time.
    #[arg(long, value_name = "DIR")]
    pub packed_cache: Option<PathBuf>,
}

impl RuntimeArgs {
    /// Builds it.
    ///
    /// # Errors
    /// The named backend does not exist or cannot run here, a plugin is refused, or a node cannot be used.
    pub fn build(&self) -> kt::Result<kt::Runtime> {
        let mut team = Team::builder().pin(match self.pin {
            PinArg::Node => Pin::Node,
            PinArg::Cpu => Pin::Cpu,
            PinArg::No => Pin::No,
        });
        if let Some(threads) = self.threads {
            team = team.threads(threads);
        }
        if let Some(nodes) = &self.nodes {
            team = team.nodes(nodes);
        }
        if let Some(spin) = self.spin {
            team = team.spin(Duration::from_micros(spin));
        }
        let mut builder =
            kt::runtime().team(team.build()?).in_place(self.in_place).batch_invariant(self.batch_invariant).huge_pages(
                match self.huge_pages {
                    HugePagesArg::No => HugePages::No,
                    HugePagesArg::Transparent => HugePages::Transparent,
                    HugePagesArg::Reserved => HugePages::Reserved,
                },
            );
        #[cfg(feature = "plugins")]
        for path in &self.plugin {
            builder = if path.is_dir() { builder.plugin_dir(path) } else { builder.plugin(path) };
        }
        if let Some(backend) = &self.backend {
            builder = builder.backend(backend);
        }
        if let Some(tier) = self.isa {
            builder = builder.max_tier(tier);
        }
        if let Some(dir) = &self.packed_cache {
            builder = builder.packed_cache(dir);
        }
        #[cfg(all(feature = "amx", target_arch = "x86_64"))]
        if self.isa.is_none_or(|tier| tier >= Tier::Amx)
            && let Some(amx) = crate::crossover::backend()
        {
            builder = builder.with_backend(amx);
        }
        #[cfg(feature = "blis")]
        if let Some(path) = &self.blis {
            builder = builder.with_backend(kt::blis::backend_at(path, self.isa.unwrap_or(Tier::Amx))?);
        }
        if let Some(tokens) = self.pass_tokens {
            builder = builder.pass_tokens(tokens);
        }
        builder.build()
    }
}

/// What the packed cache did for a load, each line behind `label`; nothing without one.
pub fn cache_text(label: &str, report: Option<&CacheReport>) -> String {
    let text = report.map(|report| report.to_string()).unwrap_or_default();
    text.lines().map(|line| format!("{label}{line}\n")).collect()
}

/// `1 thread`, `2 threads`.
pub fn threads_text(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}
