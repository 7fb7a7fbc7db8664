//! How the outputs of a matrix are divided over the NUMA nodes of a team.
//!
//! Each node holds some panels (16 outputs, or what the kernel packs together) of every matrix, and its threads compute these outputs: of gate and up in whole input blocks of
//! down (128 outputs), of down in panels. No output is a sum of parts, so how many nodes there are changes no bit of it.

use std::ops::Range;

use super::kernel::{Outputs, Weights};

/// Cuts `0..outputs` into one range per node, in whole `unit`s and in proportion to `shares`; some may be empty. `turn` shifts the
/// cuts: over many turns every node gets exactly its part, even of a few units.
pub(crate) fn cut(outputs: usize, unit: usize, shares: &[usize], turn: usize) -> Vec<Range<usize>> {
    let all: usize = shares.iter().sum::<usize>().max(1);
    let units = outputs.div_ceil(unit);
    // Turns next to each other shift by about 0.62 of the whole, so that any few of them are spread over it.
    let shift = turn.wrapping_mul(0x9e37_79b1) % all;
    let (mut sum, mut start) = (0, 0);
    shares
        .iter()
        .map(|share| {
            sum += share;
            let end = ((sum * units + shift) / all * unit).min(outputs);
            let range = start..end;
            start = end;
            range
        })
        .collect()
}

/// A matrix whose outputs are divided over nodes.
pub(crate) struct Sliced {
    /// By rising outputs, none empty.
    slices: Vec<Slice>,
}

struct Slice {
    /// The first output of this slice.
    start: usize,
    /// The output that row 0 of the weights is: `start`, or 0 where all slices are in the same map.
    first: usize,
    weights: Weights,
}

impl Sliced {
    /// Weights used in place, whose slices are all in one map.
    pub fn in_place(weights: Weights) -> Self {
        Sliced { slices: vec![Slice { start: 0, first: 0, weights }] }
    }

    /// Weights of the given parts of the outputs, in order.
    pub fn packed(slices: impl IntoIterator<Item = (Range<usize>, Weights)>) -> Self {
        let slices = slices.into_iter().filter(|(range, _)| !range.is_empty());
        let slices = slices.map(|(range, weights)| Slice { start: range.start, first: range.start, weights });
        Sliced { slices: slices.collect() }
    }

    fn slice(&self, output: usize) -> &Slice {
        &self.slices[self.slices.iter().rposition(|s| s.start <= output).unwrap_or(0)]
    }

    /// Some outputs, all of one slice.
    pub fn outputs(&self, range: Range<usize>) -> Outputs<'_> {
        let slice = self.slice(range.start);
        Outputs::new(&slice.weights, range.start - slice.first..range.end - slice.first)
    }

    /// The weights that hold an output, and its number in them, for [`Outputs::next`].
    pub fn at(&self, output: usize) -> (&Weights, usize) {
        let slice = self.slice(output);
        (&slice.weights, output - slice.first)
    }
}

/// The columns of an output cut into tiles, by node.
#[derive(Default)]
pub(crate) struct Columns {
    /// Where each tile ends.
    pub ends: Vec<usize>,
    /// The tiles of each node.
    pub lanes: Vec<Range<usize>>,
}

/// How wide tiles are at most, and of how many a thread has its choice at least: the wider, the fewer times inputs are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Width {
    pub most: usize,
    pub each: usize,
}

impl Columns {
    /// `ranges` are the nodes' outputs; each is cut so that its threads have tiles enough, with `row_tiles` tiles of rows for each, and whole
    /// panels of `panel` outputs, a power of two.
    pub fn new(ranges: &[Range<usize>], threads: &[usize], row_tiles: usize, (panel, width): (usize, Width)) -> Self {
        let mut columns = Columns::default();
        columns.set(ranges, threads, row_tiles, (panel, width));
        columns
    }

    /// As [`Columns::new`], in place of what is here.
    pub fn set(
        &mut self,
        ranges: &[Range<usize>],
        threads: &[usize],
        row_tiles: usize,
        (panel, width): (usize, Width),
    ) {
        self.ends.clear();
        self.lanes.clear();
        for (range, &threads) in ranges.iter().zip(threads) {
            let width = tile_cols(range.len(), row_tiles, threads, panel, width);
            let before = self.ends.len();
            self.ends.extend((1..=range.len().div_ceil(width)).map(|i| range.end.min(range.start + i * width)));
            self.lanes.push(before..self.ends.len());
        }
    }

    /// The columns of tile `i`.
    pub fn tile(&self, i: usize) -> Range<usize> {
        i.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[i]
    }

    /// Those of all tiles.
    pub fn tiles(&self) -> impl Iterator<Item = Range<usize>> {
        (0..self.ends.len()).map(|i| self.tile(i))
    }

    /// The widest tile.
    pub fn widest(&self) -> Range<usize> {
        self.tiles().max_by_key(Range::len).unwrap_or_default()
    }
}

/// Width of output tiles: enough of them for the threads, and never below a panel.
fn tile_cols(outputs: usize, row_tiles: usize, threads: usize, panel: usize, width: Width) -> usize {
    let Width { mut most, each } = width;
    while most > panel && outputs.div_ceil(most) * row_tiles < each * threads {
        most /= 2;
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_cover_everything_in_units_and_are_fair_over_turns() {
        for shares in [&[1][..], &[1, 1], &[3, 1], &[1, 0, 2], &[4, 4, 4, 4], &[7, 5, 3, 2, 2, 1, 1, 1]] {
            for outputs in [1, 16, 100, 768, 1408, 2880] {
                for unit in [16, 128] {
                    let mut got = vec![0; shares.len()];
                    let all: usize = shares.iter().sum();
                    for turn in 0..all {
                        let ranges = cut(outputs, unit, shares, turn);
                        assert_eq!(ranges.len(), shares.len());
                        let mut end = 0;
                        for (i, r) in ranges.iter().enumerate() {
                            assert_eq!(r.start, end);
                            assert!(r.end.is_multiple_of(unit) || r.end == outputs);
                            assert!(shares[i] > 0 || r.is_empty());
                            end = r.end;
                            got[i] += r.len().div_ceil(unit);
                        }
                        assert_eq!(end, outputs);
                    }
                    let units = outputs.div_ceil(unit);
                    for (got, share) in got.iter().zip(shares) {
                        // the multiplier is a prime, so the turns are all shifts once.
                        assert_eq!(*got, units * share, "{outputs} by {unit} over {shares:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn columns_are_tiles_of_their_nodes() {
        let columns =
            Columns::new(&[0..1008, 1008..1008, 1008..2050], &[2, 1, 1], 1, (16, Width { most: 256, each: 4 }));
        assert_eq!(columns.lanes, [0..8, 8..8, 8..13]);
        assert_eq!(columns.ends[7], 1008);
        assert_eq!(columns.ends.last(), Some(&2050));
        let whole = std::iter::once(0..1024).collect::<Vec<_>>();
        assert_eq!(Columns::new(&whole, &[64], 1, (64, Width { most: 256, each: 4 })).ends.len(), 16);
        assert_eq!(Columns::new(&whole, &[1], 1, (16, Width { most: 1024, each: 2 })).ends, [512, 1024]);
    }
}
