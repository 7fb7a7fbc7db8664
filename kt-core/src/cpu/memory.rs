//! Aligned memory, and buffers that tasks of one parallel region divide among themselves.

#![allow(unsafe_code)] // memory

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use memmap2::MmapMut;

use super::team::{CALLER_SPIN, Team};
use super::topology::pages_by_node;
use crate::backend::Residence;
use crate::error::{Error, Result};
use crate::plugin::guest::HostArea;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: an array of bytes without padding; any bit pattern is a value, and zero is one.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; `Line` is `Copy`, `repr(C)`, and its size equals its alignment.
unsafe impl bytemuck::Pod for Line {}

/// Bytes on a 64-byte boundary that only grow.
#[derive(Default)]
pub struct AlignedBytes {
    lines: Vec<Line>,
}

impl AlignedBytes {
    /// The first `len` bytes, growing if need be; old content is unspecified.
    pub fn get(&mut self, len: usize) -> &mut [u8] {
        let lines = len.div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; 64]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }

    /// Room for `len` numbers, growing if need be; old content is unspecified.
    pub fn floats(&mut self, len: usize) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.get(len * size_of::<f32>()))
    }

    /// The first `len` bytes as they are.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn read(&self, len: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..len]
    }

    /// Bytes held.
    pub fn capacity(&self) -> usize {
        self.lines.capacity() * 64
    }
}

/// Hints that bytes will be read soon.
#[inline(always)]
pub(crate) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(size_of::<Line>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Which pages hold packed weights. Larger ones cost fewer address translations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Those of the system's usual size.
    No,
    /// Transparent huge pages, where the system gives them.
    #[default]
    Transparent,
    /// Pages of 2 MiB that the administrator has reserved (`vm.nr_hugepages`), as long as there are enough of them; transparent ones otherwise.
    Reserved,
}

/// Bytes of a huge page that is asked for.
const HUGE: usize = 2 << 20;

/// Zeroed pages for packed weights, page-aligned.
///
/// # Errors
/// The system's word when it refuses.
pub fn zeroed_pages(len: usize, huge: HugePages) -> Result<MmapMut> {
    #[cfg(target_os = "linux")]
    if huge == HugePages::Reserved && len >= HUGE {
        // The system reserves them all now or refuses now, so that touching them cannot fail.
        let map = memmap2::MmapOptions::new().len(len.next_multiple_of(HUGE)).huge(Some(21)).map_anon();
        if let Ok(map) = map {
            return Ok(map);
        }
    }
    let map = MmapMut::map_anon(len.max(1))
        .map_err(|source| Error::Io { path: format!("(memory: {len} bytes for packed weights)").into(), source })?;
    #[cfg(target_os = "linux")]
    if len >= HUGE && huge != HugePages::No {
        // Advice: a system without transparent huge pages answers with an error and loses nothing.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    Ok(map)
}

/// Pages for packed weights on the node of a team's share, with why they are not bound to it, where they should be.
pub(crate) fn pages_near(team: &Team, share: usize, len: usize, huge: HugePages) -> Result<(MmapMut, Option<String>)> {
    let mut map = zeroed_pages(len, huge)?;
    let mut unbound = None;
    if team.wants_memory_near() {
        unbound = team.topology().bind_memory(&mut map, team.shares()[share].node).err();
    }
    Ok((map, unbound))
}

/// Where the pages of `area` are, which are meant for `node`.
pub(crate) fn residence(area: &[u8], node: usize, unbound: Option<String>) -> Residence {
    Residence { node, bytes: area.len() as u64, nodes: pages_by_node(area), huge: huge_share(area), unbound }
}

/// Memory of packed weights while they are being packed.
pub(crate) enum Pages {
    /// This process's, or this program's where plugins have a part of their own.
    Own(MmapMut),
    /// The host's, that this is a plugin of.
    Host(HostArea),
}

impl Pages {
    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Pages::Own(map) => map,
            Pages::Host(area) => area.bytes_mut(),
        }
    }

    /// The first `len` bytes, never to be written again.
    pub fn freeze(self, len: usize) -> Result<Bytes> {
        let bytes = match self {
            Pages::Own(map) => {
                let map = map.make_read_only();
                Bytes::from_owner(
                    map.map_err(|source| Error::Io { path: "(protecting packed weights)".into(), source })?,
                )
            }
            Pages::Host(area) => Bytes::from_owner(area),
        };
        Ok(bytes.slice(..len))
    }
}

/// Which part of the touched memory around `area` is in huge pages, transparent or reserved; `None` where the system does not tell.
pub fn huge_share(area: &[u8]) -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let (from, to) = (area.as_ptr() as usize, area.as_ptr() as usize + area.len());
    let (mut within, mut resident, mut huge) = (false, 0u64, 0u64);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next()?;
        if let Some((a, b)) = first.split_once('-')
            && let (Ok(a), Ok(b)) = (usize::from_str_radix(a, 16), usize::from_str_radix(b, 16))
        {
            within = a < to && from < b;
        } else if within {
            let kib = words.next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
            match first {
                "Rss:" => resident += kib,
                "AnonHugePages:" => huge += kib,
                // Reserved pages are not in Rss.
                "Private_Hugetlb:" | "Shared_Hugetlb:" => {
                    resident += kib;
                    huge += kib;
                }
                _ => {}
            }
        }
    }
    (resident > 0).then(|| huge as f64 / resident as f64)
}

/// What became of a piece, in `Marks::states`: nobody has it.
const FREE: u8 = 0;
/// A task has it, or had it.
const TAKEN: u8 = 1;
/// It is written, and from now on only read.
const FILLED: u8 = 2;
/// The task that should have written it ended without having done so.
const FAILED: u8 = 3;

/// Which pieces of a buffer were taken, and where they end: memory that is kept from one buffer to the next.
#[derive(Default)]
pub(crate) struct Marks {
    ends: Vec<usize>,
    states: Vec<AtomicU8>,
}

impl Marks {
    /// Makes room for so many pieces.
    pub fn reserve(&mut self, pieces: usize) {
        self.ends.clear();
        self.ends.reserve(pieces);
        self.start(0);
        self.states.reserve(pieces);
    }

    /// None of so many pieces was taken.
    fn start(&mut self, pieces: usize) {
        self.states.clear();
        self.states.resize_with(pieces, || AtomicU8::new(FREE));
    }

    /// Takes piece `i`; false when it was taken before.
    fn take(&self, i: usize) -> bool {
        self.states[i].compare_exchange(FREE, TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// A buffer cut into consecutive pieces, each of which one task takes, once, from whichever thread it runs on.
pub struct Pieces<'a, T> {
    data: *mut T,
    /// The length of every piece, where `marks` do not say where they end.
    every: Option<usize>,
    marks: Marks,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: `take` hands each disjoint piece to one caller only, so sharing the handle shares no element; T itself must be Send.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}
// SAFETY: the handle is a unique borrow of a slice of Send elements.
unsafe impl<T: Send> Send for Pieces<'_, T> {}

impl<'a, T> Pieces<'a, T> {
    /// Cuts `data` into pieces of the given lengths.
    ///
    /// # Panics
    /// When the lengths do not add up to the buffer.
    pub fn new(data: &'a mut [T], lengths: impl IntoIterator<Item = usize>) -> Self {
        Self::within(Marks::default(), data, lengths)
    }

    /// As [`Pieces::new`], in memory that [`Pieces::marks`] gives back.
    pub(crate) fn within(mut marks: Marks, data: &'a mut [T], lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0usize;
        marks.ends.clear();
        marks.ends.extend(lengths.into_iter().map(|n| {
            end = end.checked_add(n).expect("pieces do not cover the buffer");
            end
        }));
        assert_eq!(end, data.len(), "pieces do not cover the buffer");
        marks.start(marks.ends.len());
        Pieces { data: data.as_mut_ptr(), every: None, marks, _borrow: PhantomData }
    }

    /// Cuts `data` into pieces of `len` elements each.
    ///
    /// # Panics
    /// When `len` does not divide the buffer.
    pub fn every(data: &'a mut [T], len: usize) -> Self {
        Self::every_within(Marks::default(), data, len)
    }

    /// As [`Pieces::every`], in memory that [`Pieces::marks`] gives back.
    pub(crate) fn every_within(mut marks: Marks, data: &'a mut [T], len: usize) -> Self {
        assert!(len > 0 && data.len().is_multiple_of(len), "pieces do not cover the buffer");
        marks.start(data.len() / len);
        Pieces { data: data.as_mut_ptr(), every: Some(len), marks, _borrow: PhantomData }
    }

    /// The memory of the marks, when all is done.
    pub(crate) fn marks(self) -> Marks {
        self.marks
    }

    /// Where pieces begin and end that follow each other.
    fn bounds(&self, pieces: Range<usize>) -> Range<usize> {
        let ends = &self.marks.ends;
        let end = |pieces: usize| match self.every {
            Some(len) => pieces * len,
            None if pieces == 0 => 0,
            None => ends[pieces - 1],
        };
        end(pieces.start)..end(pieces.end)
    }

    /// Piece `i`.
    ///
    /// # Panics
    /// When it was taken before, or does not exist.
    #[allow(clippy::mut_from_ref)] // each piece leaves once, which its state enforces
    pub fn take(&self, i: usize) -> &mut [T] {
        assert!(self.marks.take(i), "piece {i} taken twice");
        let bounds = self.bounds(i..i + 1);
        // SAFETY: `bounds` lies within the buffer borrowed for 'a, pieces are disjoint, and the state lets each leave only once.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(bounds.start), bounds.len()) }
    }

    /// Pieces that follow each other, for a task to write what others wait for: they are [filled](Pieces::filled) once that is [`done`](Filling::done).
    ///
    /// # Panics
    /// As [`Pieces::take`].
    pub(crate) fn fill(&self, pieces: Range<usize>) -> Filling<'_, T> {
        let (start, end) = (pieces.start, pieces.end);
        assert!(start <= end && end <= self.marks.states.len(), "there are no pieces {pieces:?}");
        let mut filling = Filling { states: &self.marks.states[start..start], values: &mut [], done: false };
        for i in pieces {
            assert!(self.marks.take(i), "piece {i} taken twice");
            filling.states = &self.marks.states[start..=i];
        }
        let bounds = self.bounds(start..end);
        // SAFETY: as in `take`; pieces that follow each other are one slice.
        filling.values = unsafe { std::slice::from_raw_parts_mut(self.data.add(bounds.start), bounds.len()) };
        filling
    }

    /// Whether nobody would wait for these pieces in [`Pieces::filled`].
    pub(crate) fn are_filled(&self, pieces: Range<usize>) -> bool {
        let mut states = self.marks.states[pieces].iter().map(|state| state.load(Ordering::Relaxed));
        states.all(|state| state == FILLED || state == FAILED)
    }

    /// Pieces that follow each other, when tasks on other threads have [filled](Pieces::fill) them all; `None` when one of these failed. Whoever waits must
    /// know that they are running, or have run.
    ///
    /// # Panics
    /// When there are no such pieces.
    pub(crate) fn filled(&self, pieces: Range<usize>) -> Option<&[T]>
    where
        T: Sync,
    {
        let mut since = None;
        for state in &self.marks.states[pieces.clone()] {
            let mut spins = 0u32;
            loop {
                match state.load(Ordering::Acquire) {
                    FILLED => break,
                    FAILED => return None,
                    _ => std::hint::spin_loop(),
                }
                spins += 1;
                if spins.is_multiple_of(128) && since.get_or_insert_with(Instant::now).elapsed() > CALLER_SPIN {
                    // Who fills it was probably descheduled: let it have this core.
                    std::thread::sleep(Duration::from_micros(10));
                }
            }
        }
        let bounds = self.bounds(pieces);
        // SAFETY: as in `take`; every piece is filled, which is said once, when the only reference to write through has ended, and nothing ever
        // makes another: `take` and `fill` refuse what is not free.
        Some(unsafe { std::slice::from_raw_parts(self.data.add(bounds.start), bounds.len()) })
    }
}

/// Pieces that are being written, by one task: see [`Pieces::fill`].
pub(crate) struct Filling<'a, T> {
    states: &'a [AtomicU8],
    values: &'a mut [T],
    done: bool,
}

impl<T> Filling<'_, T> {
    /// All is written. What is dropped without it has failed.
    pub fn done(mut self) {
        self.done = true;
    }
}

impl<T> Deref for Filling<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.values
    }
}

impl<T> DerefMut for Filling<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.values
    }
}

impl<T> Drop for Filling<'_, T> {
    fn drop(&mut self) {
        let state = if self.done { FILLED } else { FAILED };
        // Nothing is written through it from here on.
        self.values = &mut [];
        self.states.iter().for_each(|s| s.store(state, Ordering::Release));
    }
}

/// A row-major matrix cut into a grid of tiles, each of which one task takes, once.
pub struct Grid<'a> {
    data: *mut f32,
    rows: usize,
    tile_rows: usize,
    /// Where the tiles of a row end.
    ends: &'a [usize],
    marks: Marks,
    _borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: `take` hands each disjoint tile to one caller only.
unsafe impl Sync for Grid<'_> {}
// SAFETY: the handle is a unique borrow of a slice.
unsafe impl Send for Grid<'_> {}

impl<'a> Grid<'a> {
    /// Cuts `data: [rows, ends.last()]` into tiles of at most `tile_rows` rows, whose columns end at `ends` (rising).
    ///
    /// # Panics
    /// When the shape does not match the buffer, a tile has no columns, or `tile_rows` is 0.
    pub fn new(data: &'a mut [f32], rows: usize, tile_rows: usize, ends: &'a [usize]) -> Self {
        Self::within(Marks::default(), data, rows, tile_rows, ends)
    }

    /// As [`Grid::new`], in memory that [`Grid::marks`] gives back.
    pub(crate) fn within(
        mut marks: Marks,
        data: &'a mut [f32],
        rows: usize,
        tile_rows: usize,
        ends: &'a [usize],
    ) -> Self {
        let cols = ends.last().copied().unwrap_or(0);
        let rising = ends.first().is_none_or(|&e| e > 0) && ends.windows(2).all(|w| w[0] < w[1]);
        assert!(rows.checked_mul(cols) == Some(data.len()), "tiles do not cover the matrix");
        assert!(tile_rows > 0 && rising, "a tile has no rows or no columns");
        marks.start(rows.div_ceil(tile_rows) * ends.len());
        Grid { data: data.as_mut_ptr(), rows, tile_rows, ends, marks, _borrow: PhantomData }
    }

    /// The memory of the marks, when all is done.
    pub(crate) fn marks(self) -> Marks {
        self.marks
    }

    /// The tile in row `row` and column `col` of the grid.
    ///
    /// # Panics
    /// When it was taken before, or does not exist.
    pub fn take(&self, row: usize, col: usize) -> GridTile<'_> {
        let tile = row.checked_mul(self.ends.len()).filter(|_| col < self.ends.len()).and_then(|t| t.checked_add(col));
        let tile = tile.filter(|&t| t < self.marks.states.len());
        let tile = tile.unwrap_or_else(|| panic!("there is no tile {row}, {col}"));
        assert!(self.marks.take(tile), "tile {row}, {col} taken twice");
        let r = row * self.tile_rows;
        let c = if col == 0 { 0 } else { self.ends[col - 1] };
        GridTile {
            data: self.data,
            stride: self.ends[self.ends.len() - 1],
            rows: r..self.rows.min(r + self.tile_rows),
            cols: c..self.ends[col],
            _borrow: PhantomData,
        }
    }
}

/// One tile of a [`Grid`].
pub struct GridTile<'a> {
    data: *mut f32,
    stride: usize,
    /// Rows of the matrix that the tile covers.
    pub rows: Range<usize>,
    /// Columns of the matrix that the tile covers.
    pub cols: Range<usize>,
    _borrow: PhantomData<&'a mut [f32]>,
}

impl GridTile<'_> {
    /// The tile's part of row `row` of the matrix.
    ///
    /// # Panics
    /// When the row is outside the tile.
    pub fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(self.rows.contains(&row), "row {row} is outside {:?}", self.rows);
        // SAFETY: row and columns lie within the matrix borrowed by the grid, tiles are disjoint, each was taken once, and
        // `&mut self` keeps two rows from being borrowed at a time.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride + self.cols.start), self.cols.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_tiles_cover_their_buffers_once() {
        let mut data = vec![0u32; 10];
        let pieces = Pieces::new(&mut data, [3, 0, 7]);
        pieces.take(2).fill(2);
        pieces.take(0).fill(1);
        assert!(pieces.take(1).is_empty());
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pieces.take(0).len())).is_err());
        assert_eq!(data, [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]);

        let mut data = vec![0f32; 5 * 7];
        let grid = Grid::new(&mut data, 5, 2, &[3, 6, 7]);
        for i in 0..9 {
            let mut tile = grid.take(i / 3, i % 3);
            for r in tile.rows.clone() {
                tile.row(r).iter_mut().for_each(|v| *v += 1.0);
            }
        }
        assert!(data.iter().all(|&v| v == 1.0));
    }

    #[test]
    fn filled_pieces_are_read_when_all_are_there() {
        for _ in 0..200 {
            let mut data = vec![0u32; 12];
            let pieces = Pieces::new(&mut data, [3, 0, 4, 5]);
            std::thread::scope(|scope| {
                for of in [2..4, 0..1, 1..2] {
                    let pieces = &pieces;
                    scope.spawn(move || {
                        let mut filling = pieces.fill(of);
                        filling.fill(7);
                        filling.done();
                    });
                }
                assert_eq!(pieces.filled(0..4), Some(&[7; 12][..]));
                assert!(pieces.are_filled(0..4));
                assert_eq!(pieces.filled(2..3).map(<[u32]>::len), Some(4));
            });
            assert!(refused(|| pieces.take(2).len()).contains("taken twice"));
            assert!(refused(|| pieces.fill(1..3).len()).contains("taken twice"));
            assert_eq!(pieces.filled(2..4), Some(&[7; 9][..]), "what others read stays");
        }
        let mut data = vec![0u32; 12];
        let pieces = Pieces::every(&mut data, 4);
        let broken = refused(|| {
            let _filling = pieces.fill(1..2);
            panic!("broken");
        });
        assert_eq!(broken, "broken");
        assert_eq!([0, 1, 2].map(|i| pieces.are_filled(i..i + 1)), [false, true, false]);
        let mut filling = pieces.fill(0..1);
        filling[3] = 1;
        filling.done();
        assert!(pieces.are_filled(0..2) && !pieces.are_filled(0..3));
        assert_eq!((pieces.filled(0..1), pieces.filled(0..2)), (Some(&[0, 0, 0, 1][..]), None));
        assert_eq!(pieces.filled(2..2), Some(&[][..]));
        assert!(refused(|| pieces.fill(2..4).len()).contains("no pieces"));
    }

    /// What a panic says.
    fn refused<T>(f: impl FnOnce() -> T) -> String {
        let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).err().expect("it was not refused");
        crate::pending::panic_text(&*payload)
    }

    #[test]
    fn sizes_that_wrap_cover_nothing() {
        let uncovered = "do not cover";
        let mut byte = [0u8; 1];
        for lengths in [[usize::MAX, 2], [2, usize::MAX], [usize::MAX, 1], [0, 2]] {
            let said = refused(|| Pieces::new(&mut byte, lengths).take(0).len());
            assert!(said.contains(uncovered), "{lengths:?}: {said}");
        }
        let mut floats = [0f32; 12];
        for (len, rows, end) in [(0, 1 << 63, 2), (12, (1 << 62) + 3, 4), (12, 4, 4)] {
            let said = refused(|| Grid::new(&mut floats[..len], rows, rows, &[end]).take(0, 0).rows);
            assert!(said.contains(uncovered), "{rows} x {end}: {said}");
        }
        assert!(refused(|| Grid::new(&mut floats, 4, 0, &[3]).rows).contains("no rows"));
        assert!(refused(|| Grid::new(&mut floats, 4, 1, &[2, 2, 3]).rows).contains("no columns"));
        // Tiles that there are not, the first with the number of one that there is when it wraps.
        let grid = Grid::new(&mut floats, 4, 2, &[1, 2, 3]);
        let third = usize::MAX / 3 * 2 + 1; // times three is one
        assert_eq!(third.wrapping_mul(3), 1);
        for (row, col) in [(third, 0), (0, 3), (2, 0), (usize::MAX, 2)] {
            let said = refused(|| grid.take(row, col).rows);
            assert!(said.contains("no tile"), "{row}, {col}: {said}");
        }
        assert_eq!((grid.take(0, 1).rows, grid.take(1, 0).rows), (0..2, 2..4));
    }

    #[test]
    fn aligned_bytes_are_aligned() {
        let mut b = AlignedBytes::default();
        for len in [0, 1, 64, 65, 1000] {
            assert_eq!(b.get(len).as_ptr() as usize % 64, 0);
            assert_eq!(b.get(len).len(), len);
        }
    }
}
