//! The host's side: judges shared libraries, and makes backends of those that are plugins.

#![allow(unsafe_code)] // opens libraries, and calls what they export

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kt_plugin_abi as abi;
use memmap2::MmapMut;

use super::wire::{self, answer};
use crate::backend::{Backend, Device, ExpertBank, Fit, LinearOp, LoadContext, Residence, Streaming};
use crate::cpu::memory::{pages_near, residence};
use crate::cpu::team::{Region, Team};
use crate::cpu::tier::Tier;
use crate::error::{Error, Result, Unsupported};
use crate::format::{Format, Global, Matrix, Parts};
use crate::layer::{LayerSpec, Proj};
use crate::pending::Pending;
use crate::runtime::Candidate;
use crate::source::WeightSource;
use crate::work::{Hidden, Spent, Work};

/// A shared library that is not loaded as a plugin.
#[derive(Debug, thiserror::Error)]
#[error("plugin {}: {why}", path.display())]
pub struct Refusal {
    /// The file, or the directory that was to be listed.
    pub path: PathBuf,
    /// What was wanted, and what was found.
    pub why: Why,
}

/// Why a shared library is not loaded as a plugin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// The system does not let this process read it.
    #[error("wanted a file that can be read, found: {0}")]
    Unreadable(std::io::Error),
    /// The system's loader does not take it.
    #[error("wanted a shared library for this machine; the system's loader says: {0}")]
    NotALibrary(String),
    /// It is a library of something else.
    #[error("wanted the symbol {}, found none: this is a library, but no kt plugin", abi::SYMBOL.to_string_lossy())]
    NoSymbol,
    /// The symbol is something else's.
    #[error("wanted a {} that begins with {:#018x}, found {found:#018x}", abi::SYMBOL.to_string_lossy(), abi::MAGIC)]
    NotAPlugin {
        /// What it begins with.
        found: u64,
    },
    /// It was built for another version of the boundary.
    #[error("wanted plugin ABI {}.x, found {major}.{minor}: build it with the kt-core of this host", abi::MAJOR)]
    Version {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },
    /// Its table lacks functions.
    #[error("wanted a table of {} bytes at least, found {found}", abi::FIRST_TABLE_BYTES)]
    SmallTable {
        /// Bytes of its table.
        found: u64,
    },
    /// Its panics would end the process.
    #[error(
        "wanted panics that unwind, found a build with panic=abort: it would end this process where it should report an error"
    )]
    Aborts,
    /// This CPU cannot run its code.
    #[error("wanted a build for this CPU, found one that needs {missing} too")]
    Cpu {
        /// The CPU features that are missing, with spaces between.
        missing: String,
    },
    /// What it says of itself cannot be.
    #[error("{0}")]
    Nonsense(String),
    /// Another plugin has its name.
    #[error("wanted a name of its own, found `{name}`, which is that of {} too", other.display())]
    Twice {
        /// The name.
        name: String,
        /// The other plugin.
        other: PathBuf,
    },
}

/// A shared library that was judged fit: its backend may be made. Its code stays in the process for good.
#[derive(Clone)]
pub struct Plugin {
    path: PathBuf,
    name: String,
    build: String,
    features: String,
    version: (u32, u32),
    table: Entries,
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin").field("path", &self.path).field("name", &self.name).finish_non_exhaustive()
    }
}

macro_rules! entries {
    ($($name:ident: fn($($argument:ty),*),)*; later: $($later:ident: fn($($type:ty),*),)*) => {
        /// The functions of a table: none null of those that all have, those that came later where the plugin has them.
        #[derive(Clone, Copy)]
        struct Entries {
            $($name: unsafe extern "C" fn($($argument),*) -> u32,)*
            $($later: Option<unsafe extern "C" fn($($type),*) -> u32>,)*
        }

        impl Entries {
            fn of(table: &abi::Table) -> Result<Self, Why> {
                Ok(Entries {
                    $($name: table.$name.ok_or_else(|| {
                        Why::Nonsense(concat!("wanted a function `", stringify!($name), "`, found null").into())
                    })?,)*
                    $($later: table.$later,)*
                })
            }
        }
    };
}

entries! {
    backend_new: fn(*const abi::Host, abi::Text, *mut abi::Backend, *mut abi::Message),
    backend_drop: fn(abi::Backend, *mut abi::Message),
    probe: fn(abi::Backend, *const abi::Layer, *mut abi::Fit, *mut abi::Message),
    load: fn(
        abi::Backend, *const abi::Context, *const abi::Layer, *const u32, usize, *mut abi::Packed, *mut abi::Message
    ),
    bank_run: fn(abi::Bank, *const abi::Work, *mut abi::Message),
    bank_submit: fn(abi::Bank, *const abi::Work, *mut abi::Pending, *mut abi::Message),
    pending_wait: fn(abi::Pending, *mut f32, usize, *mut abi::Spent, *mut abi::Message),
    pending_drop: fn(abi::Pending, *mut abi::Message),
    bank_drop: fn(abi::Bank, *mut abi::Message),
    probe_linear: fn(abi::Backend, abi::Text, usize, usize, *mut abi::Fit, *mut abi::Message),
    linear: fn(abi::Backend, *const abi::Context, *const abi::Matrix, *mut abi::Packed, *mut abi::Message),
    linear_forward: fn(abi::Linear, *const f32, usize, *mut f32, usize, *mut abi::Message),
    linear_drop: fn(abi::Linear, *mut abi::Message),
    ; later:
    device: fn(abi::Backend, *mut abi::Device, *mut bool, *mut abi::Message),
    load_replaceable: fn(
        abi::Backend, *const abi::Context, *const abi::Layer, *const u32, usize, *mut abi::Packed, *mut abi::Message
    ),
    bank_replace: fn(abi::Bank, *const c_void, u32, u32, *mut abi::Message),
    probe_stream: fn(abi::Backend, *const abi::Layer, *mut abi::Streaming, *mut abi::Message),
    stream: fn(abi::Backend, *const c_void, *const abi::Layer, *const abi::Work, *mut abi::Message),
    in_place: fn(abi::Backend, *mut abi::Backend, *mut abi::Message),
    invariant: fn(abi::Backend, *mut abi::Backend, *mut abi::Message),
}

/// Opens a shared library and judges it by what it exports, before anything of it is called but what the system's loader calls (the
/// library's initializers). It is never unloaded, whether it is refused or not: what it has registered for the end of threads, and constants
/// that its errors may point to, must stay.
///
/// Opening a library runs its code: the path must be trusted as the program is.
///
/// # Errors
/// With path, what was wanted and what was found.
pub fn load(path: impl AsRef<Path>) -> Result<Plugin, Refusal> {
    let path = path.as_ref();
    // A path without a slash would be looked for in the system's directories.
    let full = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    judge(&full).map_err(|why| Refusal { path: path.to_owned(), why })
}

fn judge(path: &Path) -> Result<Plugin, Why> {
    // The loader's own words about such files are many and poor; and to open a pipe waits for who writes to it.
    let plain = std::fs::metadata(path).and_then(|m| match m.is_file() {
        true => std::fs::File::open(path).map(drop),
        false => Err(std::io::Error::other("not a plain file")),
    });
    plain.map_err(Why::Unreadable)?;
    let library = open(path).map_err(|error| {
        // What the system says is the error's source.
        let source = std::error::Error::source(&error).map(|s| s.to_string());
        Why::NotALibrary(source.unwrap_or_else(|| error.to_string()))
    })?;
    // SAFETY: only the address is taken here; what may be read at it is decided below.
    let handshake = unsafe { library.get::<*const abi::Handshake>(abi::SYMBOL) }.map_or(std::ptr::null(), |s| *s);
    std::mem::forget(library);
    if handshake.is_null() {
        return Err(Why::NoSymbol);
    }
    if !handshake.is_aligned() {
        return Err(Why::Nonsense(format!("wanted an aligned {}, found {handshake:p}", abi::SYMBOL.to_string_lossy())));
    }
    // SAFETY: a symbol of this name is taken to be 8 readable bytes at least; with the right ones, 16; and with the right version, a
    // whole handshake of constant data. That is what the ABI says, and as much as can be known.
    let handshake = unsafe {
        let found = (*handshake).magic;
        if found != abi::MAGIC {
            return Err(Why::NotAPlugin { found });
        }
        let (major, minor) = ((*handshake).major, (*handshake).minor);
        if major != abi::MAJOR {
            return Err(Why::Version { major, minor });
        }
        &*handshake
    };
    if handshake.table_bytes < abi::FIRST_TABLE_BYTES as u64 {
        return Err(Why::SmallTable { found: handshake.table_bytes });
    }
    match handshake.unwinds {
        1 => {}
        0 => return Err(Why::Aborts),
        other => return Err(Why::Nonsense(format!("wanted 0 or 1 for whether its panics unwind, found {other}"))),
    }
    let text = |what: &str, text: abi::Text| {
        // SAFETY: constant texts of the library, which is never unloaded.
        let text = unsafe { text.get(1024) };
        text.ok_or_else(|| Why::Nonsense(format!("wanted its {what} as UTF-8 of at most 1024 bytes, found none")))
    };
    let (name, build) = (text("name", handshake.name)?, text("build description", handshake.build)?);
    let features = text("list of CPU features", handshake.features)?;
    if name.is_empty() || name.len() > 64 || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b)) {
        return Err(Why::Nonsense(format!("wanted a name of up to 64 letters, digits, - _ . and :, found {name:?}")));
    }
    let missing: Vec<&str> = features.split_whitespace().filter(|f| !cpu_has(f)).collect();
    if !missing.is_empty() {
        return Err(Why::Cpu { missing: missing.join(" ") });
    }
    if handshake.table.is_null() {
        return Err(Why::Nonsense("wanted a table, found null".into()));
    }
    let mut table = std::mem::MaybeUninit::<abi::Table>::zeroed();
    // Whole entries only.
    let known = (handshake.table_bytes as usize).min(size_of::<abi::Table>()) & !(size_of::<usize>() - 1);
    // SAFETY: constant data of at least so many bytes, as above; entries are functions or null, and those that are not copied are null.
    let table = unsafe {
        std::ptr::copy_nonoverlapping(handshake.table.cast::<u8>(), table.as_mut_ptr().cast(), known);
        table.assume_init()
    };
    Ok(Plugin {
        path: path.to_owned(),
        name: name.into(),
        build: build.into(),
        features: features.into(),
        version: (handshake.major, handshake.minor),
        table: Entries::of(&table)?,
    })
}

/// Opens a library with all that it needs, so that nothing is missing later, and shows its symbols to no other.
#[cfg(unix)]
fn open(path: &Path) -> Result<libloading::os::unix::Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: its initializers run; whoever names a plugin trusts it, as the documentation says.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
}

#[cfg(not(unix))]
fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: its initializers run; whoever names a plugin trusts it, as the documentation says.
    unsafe { libloading::Library::new(path) }
}

/// Whether this CPU has a feature; of those that this build does not know, it has none.
fn cpu_has(name: &str) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! look {
            ($($feature:tt),*) => {
                match name {
                    $($feature => std::arch::is_x86_feature_detected!($feature),)*
                    _ => false,
                }
            };
        }
        crate::__with_cpu_features!(look)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = name;
        false
    }
}

/// Judges every shared library of a directory, by rising path; each is a plugin, or refused. Of two with one name, the first is taken.
///
/// # Errors
/// The directory cannot be read.
pub fn list(dir: impl AsRef<Path>) -> Result<Vec<Result<Plugin, Refusal>>, Refusal> {
    let dir = dir.as_ref();
    let unreadable = |error| Refusal { path: dir.to_owned(), why: Why::Unreadable(error) };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|e| e == std::env::consts::DLL_EXTENSION) {
            paths.push(path);
        }
    }
    paths.sort();
    let mut taken: Vec<Plugin> = Vec::new();
    let all = paths.into_iter().map(|path| {
        let plugin = load(&path)?;
        once(&taken, &plugin)?;
        taken.push(plugin.clone());
        Ok(plugin)
    });
    Ok(all.collect())
}

/// Refuses a plugin whose name another has.
fn once(taken: &[Plugin], plugin: &Plugin) -> Result<(), Refusal> {
    match taken.iter().find(|p| p.name == plugin.name && p.path != plugin.path) {
        Some(other) => {
            let why = Why::Twice { name: plugin.name.clone(), other: other.path.clone() };
            Err(Refusal { path: plugin.path.clone(), why })
        }
        None => Ok(()),
    }
}

/// The backends of plugins that were named, and of those in directories, where others than plugins decline.
pub(crate) fn candidates(paths: &[PathBuf], dirs: &[PathBuf], cap: Tier) -> Result<Vec<Candidate>> {
    let mut taken: Vec<Plugin> = Vec::new();
    let mut declined = Vec::new();
    for path in paths {
        let plugin = load(path)?;
        once(&taken, &plugin)?;
        taken.push(plugin);
    }
    for dir in dirs {
        for found in list(dir)? {
            match found.and_then(|plugin| once(&taken, &plugin).map(|()| plugin)) {
                Ok(plugin) => taken.push(plugin),
                Err(refusal) => {
                    let name = refusal.path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
                    let why = Unsupported::new(refusal.to_string());
                    declined.push(Candidate { name, backend: Err(why) });
                }
            }
        }
    }
    // Named twice, or named and in a directory.
    let mut seen: Vec<PathBuf> = Vec::new();
    taken.retain(|p| {
        !seen.contains(&p.path) && {
            seen.push(p.path.clone());
            true
        }
    });
    let mut candidates: Vec<Candidate> = taken.iter().map(|p| Candidate::new(&p.name, p.backend(cap))).collect();
    candidates.extend(declined);
    Ok(candidates)
}

impl Plugin {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The backend's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which build it says it is: package and version.
    pub fn build(&self) -> &str {
        &self.build
    }

    /// The CPU features that all of it was compiled for, with spaces between; this CPU has them.
    pub fn features(&self) -> &str {
        &self.features
    }

    /// Major and minor version of the ABI that it was built for.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Makes its backend, which uses no instruction set above `cap`.
    ///
    /// # Errors
    /// The plugin's reason why it cannot run on this machine, or how it failed.
    pub fn backend(&self, cap: Tier) -> Result<impl Backend + use<>, Unsupported> {
        let mut backend = std::ptr::null_mut();
        let cap = cap.to_string();
        self.call(0, |message| {
            // SAFETY: the host's table is static, the rest points to locals.
            unsafe { (self.table.backend_new)(&HOST, abi::Text::new(&cap), &mut backend, message) }
        })
        .map_err(declined)?;
        self.not_null(0, "backend_new", backend).map_err(declined)?;
        let mut handle = BackendHandle { plugin: self.clone(), backend, device: None };
        handle.device = handle.device().map_err(declined)?;
        Ok(PluginBackend(Arc::new(handle)))
    }

    /// What it declines for want of a function.
    fn lacks(&self, what: &str) -> Unsupported {
        let (major, minor) = self.version;
        Unsupported::new(format!("{} is a plugin for ABI {major}.{minor}, which knows nothing of {what}", self.name))
    }

    fn format_names(&self, layer: &LayerSpec) -> [String; 3] {
        wire::format_names(layer, self.version.1 >= 1)
    }

    fn error(&self, layer: usize, what: String) -> Error {
        Error::Backend { backend: self.name.clone(), layer, what }
    }

    fn nonsense(&self, layer: usize, what: impl std::fmt::Display) -> Error {
        self.error(layer, format!("the plugin {} is broken: {what}", self.path.display()))
    }

    fn not_null(&self, layer: usize, entry: &str, handle: *mut c_void) -> Result<()> {
        match handle.is_null() {
            true => Err(self.nonsense(layer, format_args!("{entry} reported success and gave null"))),
            false => Ok(()),
        }
    }

    /// Calls a function of the table; its failure as an error.
    fn call(&self, layer: usize, f: impl FnOnce(&mut abi::Message) -> u32) -> Result<()> {
        let mut message = abi::Message::EMPTY;
        let code = f(&mut message);
        if code == abi::DONE {
            return Ok(());
        }
        let words = match message.get() {
            Some("") => "it gave no reason",
            Some(words) => words,
            None => "its message is not readable",
        };
        Err(match code {
            abi::UNSUPPORTED => Unsupported::new(words).into(),
            abi::CANCELLED => Error::Cancelled,
            abi::FAILED => self.error(layer, words.into()),
            abi::PANICKED => self.error(layer, format!("panicked: {words}")),
            _ => self.nonsense(layer, format_args!("it returned {code}, which means nothing; {words}")),
        })
    }

    /// Calls what ends a handle: there is nobody to report a failure to.
    fn end(&self, what: &str, f: impl FnOnce(&mut abi::Message) -> u32) {
        if let Err(error) = self.call(0, f) {
            tracing::warn!(plugin = %self.path.display(), "{what}: {error}");
        }
    }
}

/// An error where only a reason to decline can be given.
fn declined(error: Error) -> Unsupported {
    match error {
        Error::Unsupported(why) => why,
        other => Unsupported::new(other.to_string()),
    }
}

/// A plugin's backend, ended when it and all its banks are gone.
struct BackendHandle {
    plugin: Plugin,
    backend: abi::Backend,
    /// As it was at first.
    device: Option<Device>,
}

// SAFETY: the ABI lets handles be used from any thread, several at a time.
unsafe impl Send for BackendHandle {}
// SAFETY: as above.
unsafe impl Sync for BackendHandle {}

impl Drop for BackendHandle {
    fn drop(&mut self) {
        // SAFETY: made by this plugin, ended once.
        self.plugin.end("backend_drop", |m| unsafe { (self.plugin.table.backend_drop)(self.backend, m) });
    }
}

impl BackendHandle {
    fn device(&self) -> Result<Option<Device>> {
        let Some(ask) = self.plugin.table.device else { return Ok(None) };
        let mut given = false;
        let mut device = abi::Device {
            label: abi::Words::EMPTY,
            total_bytes: 0,
            free_bytes: u64::MAX,
            read_bytes_per_second: 0.0,
            call: 0,
        };
        // SAFETY: all pointers are to locals.
        self.plugin.call(0, |message| unsafe { ask(self.backend, &mut device, &mut given, message) })?;
        let told = given.then(|| wire::device_of(&device)).transpose();
        told.map_err(|what| self.plugin.nonsense(0, format_args!("it says {what}")))
    }
}

struct PluginBackend(Arc<BackendHandle>);

impl PluginBackend {
    /// A backend that the plugin makes of this one, if it does.
    fn another(
        &self,
        ask: unsafe extern "C" fn(abi::Backend, *mut abi::Backend, *mut abi::Message) -> u32,
        whether: &str,
    ) -> Option<Arc<dyn Backend>> {
        let plugin = &self.0.plugin;
        let mut backend = std::ptr::null_mut();
        // SAFETY: all pointers are to locals.
        if let Err(error) = plugin.call(0, |message| unsafe { ask(self.0.backend, &mut backend, message) }) {
            tracing::warn!(plugin = %plugin.path.display(), "it does not say whether {whether}: {error}");
            return None;
        }
        let device = self.0.device.clone();
        (!backend.is_null())
            .then(|| Arc::new(PluginBackend(Arc::new(BackendHandle { plugin: plugin.clone(), backend, device }))) as _)
    }

    /// Asks for a fit and checks it, for weights of so many bytes.
    fn fit(
        &self,
        layer: usize,
        stored: u64,
        ask: impl FnOnce(*mut abi::Fit, &mut abi::Message) -> u32,
    ) -> Result<Fit, Unsupported> {
        let plugin = &self.0.plugin;
        // Numbers that cannot be, where the plugin writes none.
        let mut fit = abi::Fit {
            rank: u32::MAX,
            inputs: [abi::Input { kind: u32::MAX, group: 0, sums: 0, times: 0 }; 2],
            packed_bytes: u64::MAX,
            mapped_bytes: u64::MAX,
            scratch_bytes_per_token: u64::MAX,
            tier: abi::Words::EMPTY,
            how: abi::Words::EMPTY,
        };
        plugin.call(layer, |message| ask(&mut fit, message)).map_err(declined)?;
        wire::fit_of(&fit, stored).map_err(|what| declined(plugin.nonsense(layer, format_args!("it says {what}"))))
    }

    /// Runs `f` with the description of what a load may use, and of the load.
    fn with_context<T>(&self, context: &LoadContext, load: &HostLoad<'_>, f: impl FnOnce(&abi::Context) -> T) -> T {
        let team = &context.team;
        let shares: Vec<abi::Share> =
            team.shares().iter().map(|s| abi::Share { node: s.node, threads: s.threads }).collect();
        f(&abi::Context {
            team: Arc::as_ptr(team).cast(),
            shares: shares.as_ptr(),
            shares_len: shares.len(),
            load: (&raw const *load).cast(),
        })
    }
}

impl Backend for PluginBackend {
    fn name(&self) -> &str {
        &self.0.plugin.name
    }

    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported> {
        let names = self.0.plugin.format_names(layer);
        let stored = layer.expert_bytes().saturating_mul(layer.experts as u64);
        self.fit(layer.index, stored, |fit, message| {
            // SAFETY: all pointers are to locals.
            unsafe { (self.0.plugin.table.probe)(self.0.backend, &wire::layer(layer, &names), fit, message) }
        })
    }

    fn load(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<Box<dyn ExpertBank>> {
        let plugin = &self.0.plugin;
        let announced = self.probe(layer)?.packed_bytes;
        let load = HostLoad::new(Some(context), Some(Wanted { layer, experts, from }));
        let names = self.0.plugin.format_names(layer);
        let mut packed = abi::Packed { handle: std::ptr::null_mut(), bytes: 0 };
        // One that lacks it loads experts that stay.
        let entry = plugin.table.load_replaceable.filter(|_| context.replaceable).unwrap_or(plugin.table.load);
        let result = self.with_context(context, &load, |context| {
            plugin.call(layer.index, |message| {
                let layer = wire::layer(layer, &names);
                let count = experts.len();
                // SAFETY: all pointers are to what lives here.
                unsafe { entry(self.0.backend, context, &layer, experts.as_ptr(), count, &mut packed, message) }
            })
        });
        let areas = load.finish(result)?;
        plugin.not_null(layer.index, "load", packed.handle)?;
        let bank = Arc::new(BankHandle { backend: self.0.clone(), bank: packed.handle, layer: layer.index });
        let most = (announced as u128 * experts.len() as u128).div_ceil(layer.experts.max(1) as u128);
        if u128::from(packed.bytes) > most {
            let what = format!("it packed {} bytes, and had announced {most}", packed.bytes);
            return Err(plugin.nonsense(layer.index, what));
        }
        context.progress.advance(0)?;
        let replacing = Replacing { layer: layer.clone(), context: context.clone() };
        Ok(Box::new(PluginBank { bank, bytes: packed.bytes, areas: Mutex::new(areas), replacing }))
    }

    fn in_place(&self) -> Option<Arc<dyn Backend>> {
        self.another(self.0.plugin.table.in_place?, "it can use weights in place")
    }

    fn invariant(&self) -> Option<Arc<dyn Backend>> {
        self.another(self.0.plugin.table.invariant?, "its numbers depend on what else is in a call")
    }

    fn device(&self) -> Option<Device> {
        let was = self.0.device.as_ref()?;
        let now = self.0.device().unwrap_or_else(|error| {
            tracing::warn!(plugin = %self.0.plugin.path.display(), "its device does not answer: {error}");
            None
        });
        // What does not answer has no room; it still is no backend of the host's memory.
        Some(now.unwrap_or_else(|| Device { free_bytes: 0, ..was.clone() }))
    }

    fn probe_stream(&self, layer: &LayerSpec) -> Result<Streaming, Unsupported> {
        let plugin = &self.0.plugin;
        let ask = plugin.table.probe_stream.ok_or_else(|| plugin.lacks("streaming"))?;
        let names = self.0.plugin.format_names(layer);
        let mut streaming = abi::Streaming { device_bytes: u64::MAX, host_bytes: u64::MAX };
        plugin
            .call(layer.index, |message| {
                // SAFETY: all pointers are to locals.
                unsafe { ask(self.0.backend, &wire::layer(layer, &names), &mut streaming, message) }
            })
            .map_err(declined)?;
        wire::streaming_of(streaming)
            .map_err(|what| declined(plugin.nonsense(layer.index, format_args!("it says {what}"))))
    }

    fn stream(&self, layer: &LayerSpec, from: &Arc<dyn WeightSource>, mut work: Work) -> Pending<Work> {
        let Some(stream) = self.0.plugin.table.stream else {
            return Pending::ready(Err(self.0.plugin.lacks("streaming").into()));
        };
        let (backend, layer, from, index) = (self.0.clone(), layer.clone(), from.clone(), layer.index);
        let run = move || {
            let plugin = &backend.plugin;
            let experts: Vec<u32> = (0..layer.experts as u32).collect();
            let load = HostLoad::new(None, Some(Wanted { layer: &layer, experts: &experts, from: &*from }));
            let names = plugin.format_names(&layer);
            let mut spent = abi::Spent { kernels: 0, waiting: 0 };
            let result = with_work(plugin, layer.index, &mut work, &mut spent, |work, message| {
                let (load, layer) = ((&raw const load).cast(), wire::layer(&layer, &names));
                // SAFETY: all pointers are to what lives here; nobody else uses the output.
                unsafe { stream(backend.backend, load, &layer, work, message) }
            });
            load.finish(result)?;
            work.spent = spent_of(spent);
            Ok(work)
        };
        // The call returns when the work is done: on a thread of its own, it is under way meanwhile.
        let name = self.0.plugin.name.clone();
        match std::thread::Builder::new().name(format!("{name} stream")).spawn(run) {
            Ok(thread) => Pending::new(move || {
                let ended = |_| Error::Backend { backend: name, layer: index, what: "its thread panicked".into() };
                thread.join().unwrap_or_else(|payload| Err(ended(payload)))
            }),
            Err(error) => Pending::ready(Err(self.0.plugin.error(index, format!("no thread to stream on: {error}")))),
        }
    }

    fn probe_linear(&self, format: Format, rows: usize, cols: usize) -> Result<Fit, Unsupported> {
        let name = format.to_string();
        self.fit(0, format.stored_bytes(rows, cols), |fit, message| {
            let (plugin, format) = (&self.0.plugin, abi::Text::new(&name));
            // SAFETY: all pointers are to locals.
            unsafe { (plugin.table.probe_linear)(self.0.backend, format, rows, cols, fit, message) }
        })
    }

    fn linear(&self, matrix: &Matrix, context: &LoadContext) -> Result<Box<dyn LinearOp>> {
        let plugin = &self.0.plugin;
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let announced = self.probe_linear(matrix.format(), rows, cols)?.packed_bytes;
        let load = HostLoad::new(Some(context), None);
        let mut packed = abi::Packed { handle: std::ptr::null_mut(), bytes: 0 };
        self.with_context(context, &load, |context| {
            plugin.call(0, |message| {
                let view = view(matrix);
                // SAFETY: all pointers are to what lives here, or as long as the view's handle.
                unsafe { (plugin.table.linear)(self.0.backend, context, &view, &mut packed, message) }
            })
        })?;
        plugin.not_null(0, "linear", packed.handle)?;
        let linear = PluginLinear { backend: self.0.clone(), linear: packed.handle, rows, cols, bytes: packed.bytes };
        if packed.bytes > announced {
            let what = format!("it packed {} bytes, and had announced {announced}", packed.bytes);
            return Err(plugin.nonsense(0, what));
        }
        Ok(Box::new(linear))
    }
}

/// A plugin's bank, ended when it and all its pending work are gone.
struct BankHandle {
    backend: Arc<BackendHandle>,
    bank: abi::Bank,
    layer: usize,
}

// SAFETY: the ABI lets handles be used from any thread, several at a time.
unsafe impl Send for BankHandle {}
// SAFETY: as above.
unsafe impl Sync for BankHandle {}

impl Drop for BankHandle {
    fn drop(&mut self) {
        let plugin = &self.backend.plugin;
        // SAFETY: made by this plugin, ended once.
        plugin.end("bank_drop", |message| unsafe { (plugin.table.bank_drop)(self.bank, message) });
    }
}

impl BankHandle {
    fn with_work(
        &self,
        work: &mut Work,
        spent: &mut abi::Spent,
        f: impl FnOnce(*const abi::Work, &mut abi::Message) -> u32,
    ) -> Result<()> {
        with_work(&self.backend.plugin, self.layer, work, spent, f)
    }
}

/// Calls a function of the table with a description of the work.
fn with_work(
    plugin: &Plugin,
    layer: usize,
    work: &mut Work,
    spent: &mut abi::Spent,
    f: impl FnOnce(*const abi::Work, &mut abi::Message) -> u32,
) -> Result<()> {
    let (first, len) = (work.first * work.hidden, work.tokens * work.hidden);
    let all = work.input.len();
    if all < first + len || work.output.len() != len {
        let what = "input and output [tokens, hidden]";
        return Err(Error::Length { what, expected: len, got: all.saturating_sub(first).min(work.output.len()) });
    }
    let (input, bf16): (*const c_void, bool) = match &*work.input {
        Hidden::F32(v) => (v[first..].as_ptr().cast(), false),
        Hidden::Bf16(v) => (v[first..].as_ptr().cast(), true),
    };
    let experts: Vec<abi::ExpertRows> =
        work.experts.iter().map(|e| abi::ExpertRows { local: e.local, start: e.rows.start, end: e.rows.end }).collect();
    let wire = abi::Work {
        input,
        bf16,
        tokens: work.tokens,
        hidden: work.hidden,
        rows: work.rows.as_ptr().cast(),
        rows_len: work.rows.len(),
        experts: experts.as_ptr(),
        experts_len: experts.len(),
        output: work.output.as_mut_ptr(),
        spent,
    };
    plugin.call(layer, |message| f(&wire, message))
}

fn spent_of(spent: abi::Spent) -> Spent {
    use std::time::Duration;
    Spent { kernels: Duration::from_nanos(spent.kernels), waiting: Duration::from_nanos(spent.waiting) }
}

struct PluginBank {
    bank: Arc<BankHandle>,
    bytes: u64,
    /// Memory that the plugin got while it loaded, as far as it has it still.
    areas: Mutex<Vec<Weak<Area>>>,
    replacing: Replacing,
}

/// What experts are loaded by that replace others.
struct Replacing {
    layer: LayerSpec,
    context: LoadContext,
}

impl ExpertBank for PluginBank {
    fn submit(&self, mut work: Work) -> Pending<Work> {
        let bank = &self.bank;
        let plugin = &bank.backend.plugin;
        let mut pending = std::ptr::null_mut();
        let mut spent = abi::Spent { kernels: 0, waiting: 0 };
        let started = bank
            .with_work(&mut work, &mut spent, |work, message| {
                // SAFETY: all pointers are to what lives here.
                unsafe { (plugin.table.bank_submit)(bank.bank, work, &mut pending, message) }
            })
            .and_then(|()| plugin.not_null(bank.layer, "bank_submit", pending));
        match started {
            Err(error) => Pending::ready(Err(error)),
            Ok(()) => {
                let pending = PendingHandle { bank: bank.clone(), pending };
                Pending::new(move || pending.wait(work))
            }
        }
    }

    fn packed_bytes(&self) -> u64 {
        self.bytes
    }

    fn residence(&self) -> Vec<Residence> {
        let areas = self.areas.lock().unwrap_or_else(PoisonError::into_inner);
        areas.iter().filter_map(|area| Some(area.upgrade()?.residence())).collect()
    }

    fn replace(&self, local: u32, expert: u32, from: &dyn WeightSource) -> Result<()> {
        let (bank, Replacing { layer, context }) = (&self.bank, &self.replacing);
        let plugin = &bank.backend.plugin;
        let replace = plugin.table.bank_replace.ok_or_else(|| plugin.lacks("experts that are replaced"))?;
        let experts = [expert];
        let load = HostLoad::new(Some(context), Some(Wanted { layer, experts: &experts, from }));
        let result = plugin.call(layer.index, |message| {
            let load = (&raw const load).cast();
            // SAFETY: the bank is live, all pointers are to what lives here.
            unsafe { replace(bank.bank, load, local, expert, message) }
        });
        let new = load.finish(result)?;
        let mut areas = self.areas.lock().unwrap_or_else(PoisonError::into_inner);
        areas.retain(|area| area.strong_count() > 0);
        areas.extend(new);
        Ok(())
    }

    fn run(&self, mut work: Work) -> Result<Work> {
        let bank = &self.bank;
        let mut spent = abi::Spent { kernels: 0, waiting: 0 };
        bank.with_work(&mut work, &mut spent, |work, message| {
            // SAFETY: all pointers are to what lives here; nobody else uses the output.
            unsafe { (bank.backend.plugin.table.bank_run)(bank.bank, work, message) }
        })?;
        work.spent = spent_of(spent);
        Ok(work)
    }
}

struct PendingHandle {
    bank: Arc<BankHandle>,
    /// Null when it was waited for.
    pending: abi::Pending,
}

// SAFETY: the ABI lets handles be used from any thread.
unsafe impl Send for PendingHandle {}

impl PendingHandle {
    fn wait(mut self, mut work: Work) -> Result<Work> {
        let pending = std::mem::replace(&mut self.pending, std::ptr::null_mut());
        let plugin = &self.bank.backend.plugin;
        let mut spent = abi::Spent { kernels: 0, waiting: 0 };
        plugin.call(self.bank.layer, |message| {
            let (output, len) = (work.output.as_mut_ptr(), work.output.len());
            // SAFETY: a live handle, which this ends; the rest points to locals.
            unsafe { (plugin.table.pending_wait)(pending, output, len, &mut spent, message) }
        })?;
        work.spent = spent_of(spent);
        Ok(work)
    }
}

impl Drop for PendingHandle {
    fn drop(&mut self) {
        if !self.pending.is_null() {
            let plugin = &self.bank.backend.plugin;
            // SAFETY: a live handle, ended once.
            plugin.end("pending_drop", |message| unsafe { (plugin.table.pending_drop)(self.pending, message) });
        }
    }
}

struct PluginLinear {
    backend: Arc<BackendHandle>,
    linear: abi::Linear,
    rows: usize,
    cols: usize,
    bytes: u64,
}

// SAFETY: the ABI lets handles be used from any thread, several at a time.
unsafe impl Send for PluginLinear {}
// SAFETY: as above.
unsafe impl Sync for PluginLinear {}

impl LinearOp for PluginLinear {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn forward(&self, x: &[f32], y: &mut [f32]) {
        let plugin = &self.backend.plugin;
        let result = plugin.call(0, |message| {
            // SAFETY: a live handle, slices that live here.
            unsafe { (plugin.table.linear_forward)(self.linear, x.as_ptr(), x.len(), y.as_mut_ptr(), y.len(), message) }
        });
        if let Err(error) = result {
            // The caller reports a panic as an error; there is no other way for one here.
            resume_unwind(Box::new(wire::failure(&error).1));
        }
    }

    fn packed_bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for PluginLinear {
    fn drop(&mut self) {
        let plugin = &self.backend.plugin;
        // SAFETY: made by this plugin, ended once.
        plugin.end("linear_drop", |message| unsafe { (plugin.table.linear_drop)(self.linear, message) });
    }
}

/// What is loaded, from where.
struct Wanted<'a> {
    layer: &'a LayerSpec,
    experts: &'a [u32],
    from: &'a dyn WeightSource,
}

/// A load under way: what the services below get back.
struct HostLoad<'a> {
    /// Nothing where experts are not kept.
    context: Option<&'a LoadContext>,
    /// Experts; nothing for a matrix outside of them.
    wanted: Option<Wanted<'a>>,
    areas: Mutex<Vec<Weak<Area>>>,
    /// What the source could not give.
    failures: Mutex<Vec<Error>>,
}

impl<'a> HostLoad<'a> {
    fn new(context: Option<&'a LoadContext>, wanted: Option<Wanted<'a>>) -> Self {
        HostLoad { context, wanted, areas: Mutex::default(), failures: Mutex::default() }
    }

    /// The memory that the plugin got; or of the source's errors the one whose words came back, else the plugin's.
    fn finish(self, result: Result<()>) -> Result<Vec<Weak<Area>>> {
        let failures = self.failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(()) => Ok(self.areas.into_inner().unwrap_or_else(PoisonError::into_inner)),
            Err(Error::Backend { backend, layer, what }) => {
                let original = failures.into_iter().find(|e| e.to_string() == what);
                Err(original.unwrap_or(Error::Backend { backend, layer, what }))
            }
            Err(error) => Err(error),
        }
    }

    /// The source, and the expert and projection that were asked for.
    fn asked(&self, expert: usize, proj: u32) -> Result<(&Wanted<'a>, usize, Proj)> {
        let none = || Error::Invalid(format!("the load has no projection {proj} of an expert at place {expert}"));
        let wanted = self.wanted.as_ref().ok_or_else(none)?;
        let id = *wanted.experts.get(expert).ok_or_else(none)?;
        Ok((wanted, id as usize, wire::proj(proj).ok_or_else(none)?))
    }

    /// Keeps the source's error for whoever asked for the load, and its words for the plugin.
    fn keep(&self, error: Error) -> Error {
        let words = Error::Invalid(error.to_string());
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(error);
        words
    }
}

/// Memory that a plugin has.
struct Area {
    map: MmapMut,
    len: usize,
    node: usize,
    unbound: Option<String>,
}

impl Area {
    fn residence(&self) -> Residence {
        residence(&self.map[..self.len], self.node, self.unbound.clone())
    }
}

/// A matrix that a plugin has, and its format's name.
struct MatrixHandle {
    parts: Parts,
    format: String,
}

/// What a plugin gets of a matrix; the handle keeps all alive.
fn view(matrix: &Matrix) -> abi::Matrix {
    let handle = Box::new(MatrixHandle { parts: matrix.parts(), format: matrix.format().to_string() });
    let parts = &handle.parts;
    let mut view = abi::Matrix {
        handle: std::ptr::null_mut(),
        format: abi::Text::new(&handle.format),
        rows: parts.rows,
        cols: parts.cols,
        codes: parts.codes.as_ptr(),
        codes_len: parts.codes.len(),
        stride: parts.stride,
        scales: std::ptr::null(),
        scales_len: 0,
        scale_type: abi::Text::new(""),
        scale_cols: 0,
        scale_stride: 0,
        global_over: false,
        global: 1.0,
        zeros: std::ptr::null(),
        zeros_len: 0,
        zero_stride: 0,
        column_groups: std::ptr::null(),
    };
    if let Some(scales) = &parts.scales {
        view.scales = scales.bytes.as_ptr();
        view.scales_len = scales.bytes.len();
        view.scale_type = abi::Text::new(wire::scale_type(scales.kind));
        view.scale_cols = scales.cols;
        view.scale_stride = scales.stride;
        (view.global_over, view.global) = match scales.global {
            Global::Times(v) => (false, v),
            Global::Over(v) => (true, v),
        };
    }
    if let Some(zeros) = &parts.zeros {
        let values = &zeros.values[zeros.first..];
        (view.zeros, view.zeros_len, view.zero_stride) = (values.as_ptr(), values.len(), zeros.stride);
    }
    if let Some(groups) = &parts.column_groups {
        view.column_groups = groups.as_ptr();
    }
    view.handle = Box::into_raw(handle).cast();
    view
}

/// What plugins may ask of this host.
static HOST: abi::Host = abi::Host {
    bytes: size_of::<abi::Host>() as u64,
    log,
    advance,
    matrix,
    matrix_drop,
    bias,
    tensor_name,
    release,
    alloc,
    free,
    team_keep,
    team_drop,
    region_begin,
    region_run,
    region_end,
    spawn,
};

// The services. SAFETY of all blocks in them: plugins keep to what the table says of pointers and handles. A `load` is a `HostLoad` of a call
// that has not returned, a `team` comes from an `Arc<Team>`, and other handles were made here with the type they are read as. Nothing unwinds:
// `answer` and `quiet` catch panics.

fn quiet<T>(otherwise: T, f: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| {
        std::mem::forget(payload);
        otherwise
    })
}

unsafe extern "C" fn log(level: u32, text: abi::Text) {
    quiet((), || {
        // SAFETY: see above.
        let Some(text) = (unsafe { text.get(1 << 16) }) else { return };
        match level {
            1 => tracing::error!(target: "kt_plugin", "{text}"),
            2 => tracing::warn!(target: "kt_plugin", "{text}"),
            3 => tracing::info!(target: "kt_plugin", "{text}"),
            4 => tracing::debug!(target: "kt_plugin", "{text}"),
            _ => tracing::trace!(target: "kt_plugin", "{text}"),
        }
    });
}

unsafe extern "C" fn advance(load: *const c_void, bytes: u64) -> u32 {
    // SAFETY: see above.
    let load = unsafe { &*load.cast::<HostLoad<'_>>() };
    quiet(abi::FAILED, || match load.context.map_or(Ok(()), |c| c.progress.advance(bytes)) {
        Ok(()) => abi::DONE,
        Err(_) => abi::CANCELLED,
    })
}

unsafe extern "C" fn matrix(
    load: *const c_void,
    expert: usize,
    proj: u32,
    out: *mut abi::Matrix,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        let load = &*load.cast::<HostLoad<'_>>();
        answer(message, || {
            let (wanted, expert, proj) = load.asked(expert, proj)?;
            let matrix = wanted.from.matrix(wanted.layer.index, expert, proj).map_err(|e| load.keep(e))?;
            out.write(view(&matrix));
            Ok(())
        })
    }
}

unsafe extern "C" fn matrix_drop(matrix: *mut c_void) {
    // SAFETY: see above.
    quiet((), || drop(unsafe { Box::from_raw(matrix.cast::<MatrixHandle>()) }));
}

unsafe extern "C" fn bias(
    load: *const c_void,
    expert: usize,
    proj: u32,
    out: *mut f32,
    len: usize,
    given: *mut bool,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        let load = &*load.cast::<HostLoad<'_>>();
        answer(message, || {
            let (wanted, expert, proj) = load.asked(expert, proj)?;
            let bias = wanted.from.bias(wanted.layer.index, expert, proj).map_err(|e| load.keep(e))?;
            given.write(bias.is_some());
            match bias {
                Some(bias) if bias.len() != len => {
                    Err(load.keep(Error::Length { what: "a bias", expected: len, got: bias.len() }))
                }
                Some(bias) => {
                    out.copy_from_nonoverlapping(bias.as_ptr(), len);
                    Ok(())
                }
                None => Ok(()),
            }
        })
    }
}

unsafe extern "C" fn tensor_name(
    load: *const c_void,
    expert: usize,
    proj: u32,
    file: *mut abi::Message,
    name: *mut abi::Message,
) {
    // SAFETY: see above.
    unsafe {
        let load = &*load.cast::<HostLoad<'_>>();
        quiet((), || {
            if let Ok((wanted, expert, proj)) = load.asked(expert, proj) {
                let (path, tensor) = wanted.from.tensor_name(wanted.layer.index, expert, proj);
                (*file).set(&path.to_string_lossy());
                (*name).set(&tensor);
            }
        });
    }
}

unsafe extern "C" fn release(load: *const c_void, expert: usize) {
    // SAFETY: see above.
    let load = unsafe { &*load.cast::<HostLoad<'_>>() };
    quiet((), || {
        if let Ok((wanted, expert, _)) = load.asked(expert, 0) {
            wanted.from.release(wanted.layer.index, expert);
        }
    });
}

unsafe extern "C" fn alloc(
    load: *const c_void,
    share: usize,
    len: usize,
    out: *mut abi::Area,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        let load = &*load.cast::<HostLoad<'_>>();
        answer(message, || {
            let Some(context) = load.context else {
                return Err(Error::Invalid("experts that are not kept get no memory of the host's".into()));
            };
            let team = &context.team;
            let Some(node) = team.shares().get(share).map(|s| s.node) else {
                return Err(Error::Invalid(format!(
                    "the team has {} shares, not one numbered {share}",
                    team.shares().len()
                )));
            };
            let (mut map, unbound) = pages_near(team, share, len, context.huge_pages)?;
            let bytes = map.as_mut_ptr();
            let bound = unbound.is_none();
            let area = Arc::new(Area { map, len, node, unbound });
            load.areas.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&area));
            out.write(abi::Area { bytes, handle: Arc::into_raw(area).cast_mut().cast(), bound });
            Ok(())
        })
    }
}

unsafe extern "C" fn free(area: *mut c_void) {
    // SAFETY: see above.
    quiet((), || drop(unsafe { Arc::from_raw(area.cast::<Area>().cast_const()) }));
}

unsafe extern "C" fn team_keep(team: *const c_void) {
    // SAFETY: see above.
    unsafe { Arc::increment_strong_count(team.cast::<Team>()) }
}

unsafe extern "C" fn team_drop(team: *const c_void) {
    // SAFETY: see above.
    quiet((), || unsafe { Arc::decrement_strong_count(team.cast::<Team>()) });
}

unsafe extern "C" fn region_begin(team: *const c_void) -> *mut c_void {
    quiet(std::ptr::null_mut(), || {
        // SAFETY: see above; the plugin keeps the team for longer than the region.
        let team: &'static Team = unsafe { &*team.cast::<Team>() };
        Box::into_raw(Box::new(team.region())).cast()
    })
}

unsafe extern "C" fn region_run(
    region: *mut c_void,
    tasks: *const usize,
    lanes: usize,
    at_home: bool,
    task: abi::Task,
    ctx: *const c_void,
) -> u32 {
    /// The plugin's pointer, on all threads of the team.
    struct Ctx(*const c_void);
    // SAFETY: the ABI has tasks called from any thread.
    unsafe impl Sync for Ctx {}

    // SAFETY: see above.
    let (region, tasks) = unsafe { (&mut *region.cast::<Region<'static>>(), std::slice::from_raw_parts(tasks, lanes)) };
    if lanes == 0 || lanes > region.shares().len() {
        return abi::FAILED;
    }
    let ctx = Ctx(ctx);
    let ctx = &ctx;
    quiet(abi::PANICKED, || {
        let body = |lane: usize, number: usize, _: &mut _| {
            // SAFETY: the plugin keeps what the pointer is to until this function returns.
            if unsafe { task(ctx.0, lane, number) } != 0 {
                // Ends the run without a word: the plugin knows why.
                resume_unwind(Box::new(()));
            }
        };
        match at_home {
            true => region.run_at_home(tasks, body),
            false => region.run_lanes(tasks, body),
        }
        abi::DONE
    })
}

unsafe extern "C" fn region_end(region: *mut c_void) {
    // SAFETY: see above.
    quiet((), || drop(unsafe { Box::from_raw(region.cast::<Region<'static>>()) }));
}

unsafe extern "C" fn spawn(team: *const c_void, job: unsafe extern "C" fn(ctx: *mut c_void), ctx: *mut c_void) -> u32 {
    /// The plugin's pointer, on another thread.
    struct Ctx(*mut c_void);
    // SAFETY: the ABI has jobs called from any thread.
    unsafe impl Send for Ctx {}

    // SAFETY: see above.
    let team = unsafe { &*team.cast::<Team>() };
    let ctx = Ctx(ctx);
    quiet(abi::FAILED, || {
        let queued = team.enqueue(Box::new(move || {
            let ctx = ctx;
            // SAFETY: called once, as the ABI says.
            unsafe { job(ctx.0) }
        }));
        if queued { abi::DONE } else { abi::FAILED }
    })
}
