//! The product of packed weights with input rows: which register tiles, in which order.
//!
//! Few rows stream: one tile of all rows, over all of K, so that each packed line is read from memory once and unpacked in registers.
//! For more rows, K is cut so that the lines of a panel or two fit the first-level cache; tiles of rows pass over them, while the lines that
//! come next are asked for. Packed lines are unpacked once before, unless unpacking them in each tile goes on beside products.

use std::marker::PhantomData;
use std::ops::Range;

use kt_core::cpu::input::{BLOCK, InputLayout, Inputs, WIDE};
use kt_core::cpu::kernel::{Outputs, Scratch, Weights};
use kt_core::format::mx;
use kt_core::{Format, Group};

use crate::ahead::{Ahead, Later, Level};
use crate::blocks::{ASK, Blocks, Decode, Direct, Row};
use crate::dots::STEP;
use crate::isa::{Isa, Job, Ports, most_stream_rows, stream_rows};
use crate::layout::{BITS, CHUNK, LINE, Layout, MOST_PANELS, PANEL, SUPER, panels, spread};
use crate::lines::{
    Bf16Lines, Bytes, Codes, E2m1, E4m3Scale, E8m0Scale, F16Lines, F16Scale, F32Lines, F32Scale, Floats, Fp8, Lines,
    Nibbles, NoScale, Scale, Scales, Unpack, Widen, WidenFloats,
};
use crate::tile::{FloatTile, IntTile, SquareTile, Tile, int_asks, one_stream, scaled, scaled_blocks};
use crate::tiled::{self, BLOCK_STEPS, MOST_ROWS, PIECE, STREAM_ROWS, SUMS_SIZE, TILE_ROWS, stream_size};
use crate::words::{
    self, CHUNK_BLOCKS, Kind, Prepare, PrepareSupers, WORD_ROWS, chunk_bytes, scales_bytes, supers_bytes,
};

/// Bytes of lines that tiles of rows pass over: most of a first-level cache of 48 KiB, all of one of 32.
const CACHED: usize = 32 << 10;
/// The same of lines that have words for scales, beside which inputs then have room.
const CACHED_WORDS: usize = 24 << 10;
/// The same where few rows pass over them: there is more to do with each line before it is written than after.
const FEW: usize = 8 << 10;

/// The most rows for which blocks in place become products without lines: for each, sums are transposed, where codes would be once.
const DIRECT_ROWS: usize = 2;

/// Rows up to which floats that stream on tiles are asked for in the order of addresses. Of more, what products read from the second level would wait for hints that
/// wait for memory (`kt-amx/PERFORMANCE.md`).
const IN_ORDER_ROWS: usize = 8;
/// Bytes of the next inputs that are asked for at once when few rows stream: as much as they are, if they are few as well.
const AT_ONCE: usize = 8 << 10;

/// A number path with a way of storing lines: which register tiles it has.
pub trait Path<I: Isa> {
    /// How its lines are stored.
    type Lines: Lines;
    /// The same weights as BF16 numbers times their scales, for a tile unit.
    type Widened: Path<I>;
    /// The same weights with words for scales, if there are inputs for that.
    type Words: Path<I>;
    /// Whether products are those of integers.
    const INTEGERS: bool;
    /// Whether a tile unit multiplies integers as such.
    const ON_TILES: bool = false;
    /// Whether there are products of [`Path::Words`].
    const IN_WORDS: bool = false;
    /// Whether lines are operands.
    const LIGHT: bool;
    /// Whether lines are BF16 numbers that become F32 beside products.
    const WIDENS: bool = false;
    /// Whether weights have scales of groups.
    const GROUPED: bool;
    /// Whether floating-point weights are [`Path::Widened`] for a tile unit where all others are.
    const WIDENS_GROUPS: bool = false;
    /// The most rows that stream.
    const STREAM_ROWS: usize;
    /// Whether rows that do not stream else do so on a tile unit.
    const STREAMS_ON_TILES: bool = false;
    /// Whether any number of them does; else up to [`TILE_ROWS`].
    const STREAMS_ANY_ROWS: bool = false;
    /// How many steps a block of 128 columns is for a unit.
    const TILE_STEPS: usize = if Self::INTEGERS { tiled::INT_STEPS } else { tiled::BLOCK_STEPS };
    /// How many panels at once these have.
    const TILE_PANELS: usize = <Self::Lines as Lines>::BUNDLE;
    /// The most rows that stream over one panel after another with operands of 512 bits, where the hardware reads a single stream best.
    const ONE_STREAM: usize;
    /// How many panels at once so many rows have that stream.
    fn stream_panels(isa: I, rows: usize) -> usize
    where
        Self: Sized,
    {
        if alone::<I, Self>(isa, rows) { 1 } else { stream_panels::<I, Self>(rows) }
    }
    /// Blocks that K is cut into multiples of.
    const SCALED_BLOCKS: usize;
    /// Lines that an operand becomes where lines are unpacked.
    const WIDENED: usize;
    /// How many times with each block tiles of many rows ask for what comes later, over lines that were unpacked or not.
    fn asks(_: I, _unpacked: bool) -> usize {
        1
    }
    /// Bytes of the words of [`Path::SCALED_BLOCKS`] blocks, and their unit, if tiles have scales as words; and of these scales as F32, if they become such.
    const WORDS: [usize; 2] = [0; 2];
    /// Panels at once for so many rows over cached lines.
    fn cached_panels(_: I, _rows: usize) -> usize {
        cached_panels::<I>()
    }
    /// Rows of the largest tile over cached lines, of so many rows in all: as many as keep sums (and totals, where scales come in between) in registers.
    fn rows(isa: I, rows: usize) -> usize;
    /// Whether that many rows pass over lines that were unpacked for them, if they do not stream.
    fn unpacked(isa: I, rows: usize) -> bool;
    /// Unpacks the lines of a block. If it needs its scales, these go on to what is behind them.
    fn unpack(isa: I, from: &[u8], scales: &mut Scales<'_>, to: &mut [u8]);
    /// Unpacks lines of some blocks of a panel, if they are to be, and makes words of their scales, for [`Path::WORDS`]: the second of these parts is
    /// memory for scales.
    fn prepare(_: I, _: &Layout, _panel: &[u8], _blocks: Range<usize>, _zero: i32, _to: [&mut [u8]; 3]) {}
    /// Runs a tile of `r` rows x as many panels as few rows have on lines as stored.
    fn stream(isa: I, r: usize, tile: Tile<'_>);
    /// Runs a tile of `r` rows x [`Path::TILE_PANELS`] on lines as stored, on a tile unit; see [`Path::STREAMS_ON_TILES`].
    fn stream_on_tiles(_: I, _r: usize, _: Tile<'_>) {
        unreachable!("these do not stream")
    }
    /// Runs a tile of `r` rows x as many panels as many rows have on lines in the cache, which were unpacked or are operands, or not.
    fn cached(isa: I, r: usize, unpacked: bool, tile: Tile<'_>);
}

/// Unsigned codes `L` x signed inputs with a scale per `XG` columns. Weights have scales `S` per `WG` columns or several times as many, or
/// (0) one per output.
pub struct Ints<L, S, const XG: usize, const WG: usize>(PhantomData<(L, S)>);
/// Floating-point weights; see [`FloatTile`].
pub(crate) struct Numbers<L, const SCALED: u8>(PhantomData<L>);

/// Runs `$job` with R set to the number of rows: a `match` over those that are compiled.
macro_rules! rows {
    ($r:expr, [$($rows:literal),*], $job:expr) => {
        match $r {
            $($rows => {
                const R: usize = $rows;
                $job
            })*
            r => unreachable!("no register tile of {r} rows"),
        }
    };
}

/// [`rows`] of tiles that stream along `$path`, and P set to their panels.
macro_rules! stream_shapes {
    ($isa:ty, $path:ty, $r:expr, $job:expr) => {
        rows!($r, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], {
            if const { R > <$path as Path<$isa>>::STREAM_ROWS } {
                unreachable!("{R} rows do not stream");
            } else if const { stream_panels::<$isa, $path>(R) == 1 } {
                const P: usize = 1;
                $job
            } else if const { stream_panels::<$isa, $path>(R) == 2 } {
                const P: usize = 2;
                $job
            } else if const { stream_panels::<$isa, $path>(R) == MOST_PANELS } {
                const P: usize = MOST_PANELS;
                $job
            } else {
                unreachable!("no tile has as many panels");
            }
        })
    };
}

/// Panels at once for rows that stream. Where little happens per line, one: a single stream from memory is fastest, if nothing that a panel needs
/// is elsewhere. Else enough independent sums to hide the latency of unpacking and scaling, as far as registers go: those that codes pass
/// through count as well. In the order of a tile unit there are three times as many.
const fn stream_panels<I: Isa, K: Path<I>>(rows: usize) -> usize {
    let bundle = K::Lines::BUNDLE;
    match rows {
        // Each panel reads the inputs of all rows, which as F32 are soon more than the first level has room for.
        2..=4 if K::WIDENS && I::LARGE && !I::TILES => 4,
        2..=4 if K::WIDENS && I::LARGE => 2,
        5..=8 if K::WIDENS && I::LARGE && !I::TILES => 2,
        _ if K::LIGHT && !K::GROUPED => 1,
        1 | 2 if I::LARGE && bundle == 2 => 2,
        2..=6 if I::LARGE && bundle == 4 && I::TILES => 2,
        // Scales of groups are among the blocks of such formats, unless groups do not divide a block.
        _ if I::LARGE && (K::LIGHT || rows <= K::ONE_STREAM) => 1,
        2.. if I::TILES => 1,
        3 | 4 if I::LARGE && bundle == 4 => 4,
        // Bits from two places, or four codes of a byte, pass through more registers than nibbles.
        1 if !I::LARGE && K::Lines::STEP != LINE => 2,
        1 => 4,
        2 if I::LARGE => 4,
        2 => 2,
        3..=6 if I::LARGE => 2,
        // Of four that take turns, one would leave three that were read with it.
        7 | 8 if I::LARGE && bundle == 4 => 2,
        _ => 1,
    }
}

/// The most rows that stream over one panel after another where there are two products a cycle, and so are done with a line before the next one comes. Zen 5, from memory that reads 21.7 to
/// 24 GB/s a core, GB/s over four panels / over one: INT4 g32 at 2 · 3 · 4 rows 19.7/23.8 · 19.2/24.0 · 18.3/24.0; but from the second level, at four rows, 48/39.
const ALONE_ROWS: usize = 3;

impl<L: Codes, S: Scale, const XG: usize, const WG: usize> Ints<L, S, XG, WG> {
    /// Whether the lines that so many rows pass over, if they do not stream, are operands, or became such before.
    fn has_operands<I: Isa>(isa: I, rows: usize) -> bool {
        L::OPERANDS == 1 || <Self as Path<I>>::unpacked(isa, rows)
    }

    /// Whether tiles of so many rows in all over cached lines are [square].
    fn is_square<I: Isa>(isa: I, rows: usize) -> bool {
        taller(isa) && const { Self::squares::<I>() } && Self::has_operands(isa, rows)
    }

    /// Whether there are such tiles: their products in assembly are of 32 columns and more. Where several of them share a scale of the weights, what these add up to would be in
    /// memory beside the totals; and scales are read from where panels are packed, which with bundles of some are not as far apart from each other.
    const fn squares<I: Isa>() -> bool {
        I::LARGE && I::VNNI && S::WORDS == 0 && WG <= XG && XG.is_multiple_of(4 * STEP) && L::BUNDLE == 1
    }
}

/// Whether so many rows stream over one panel after another on such a CPU, beyond [`Path::ONE_STREAM`] too, where there is such a stream at all.
fn alone<I: Isa, K: Path<I>>(isa: I, rows: usize) -> bool {
    I::LARGE && K::ONE_STREAM > 0 && isa.ports() == Ports::Double && (2..=ALONE_ROWS).contains(&rows)
}

/// Whether so many rows stream in two passes, of bundles whose lines would be unpacked for them before. That takes longer than to unpack them twice beside products where there
/// are two of these a cycle: Zen 5, from memory, before / in two passes, us at 14 · 16 · 20 · 24 rows: Q5_K 92/85 · 100/92 · 118/97 · 132/118, Q6_K 85/79 · 93/86 ·
/// 106/105 · 121/119. Not codes of two bits (layers of TQ1_0 and IQ1_S 5 to 10 % slower), and not FP8 of which tiles of fewer rows are shifted (level, or 2 % slower).
fn streams_twice<I: Isa, K: Path<I>>(isa: I, rows: usize) -> bool {
    let bundles = const { K::Lines::BUNDLE > 1 && (I::VNNI && K::Lines::SHARED || !K::INTEGERS) };
    let measured = const { I::LARGE && !I::TILES } && bundles;
    let few = measured && rows <= 2 * isa.stream_rows(K::STREAM_ROWS);
    // Both passes go over as many panels at once.
    let alike = || K::stream_panels(isa, rows / 2) == K::stream_panels(isa, rows.div_ceil(2));
    few && isa.ports() == Ports::Double && K::unpacked(isa, K::STREAM_ROWS + 1) && alike()
}

/// Panels at once for rows that pass over lines in the cache.
const fn cached_panels<I: Isa>() -> usize {
    if I::LARGE { 2 } else { 1 }
}

/// Whether tiles over cached lines have four panels and up to six rows, and their products are in assembly: where loads take the place of products, such tiles have the fewest of them. Those of
/// numbers, and of integers for [some](Ints::squares).
fn square<I: Isa>(isa: I) -> bool {
    I::LARGE && !I::TILES && isa.ports() == Ports::Shared
}

/// Whether tiles of integers over cached lines that are not [square] have a row more, and nibbles are unpacked for all of them: where what is not a product takes the place of
/// one, and products take five cycles, so that twelve sums are too few for two a cycle.
fn taller<I: Isa>(isa: I) -> bool {
    I::VNNI && square(isa)
}

/// Whether BF16 lines are widened to meet F32 inputs beside products: by tiles of many rows, too, but where these are for a tile unit.
const fn widens<I: Isa, L: Floats>() -> bool {
    L::BF16 && L::OPERANDS == 1 && I::INPUT_BYTES > 2
}

/// Whether FP8 codes may become operands in tiles of many rows as in those of few: shifts are done beside products.
const fn shifts_in_tile<I: Isa, L: Floats>() -> bool {
    L::FP8 && I::FP8_NORMAL && I::INPUT_BYTES == 2 && !I::TILES
}

/// Whether codes in nibbles that are looked up may be so in tiles of many rows. What that takes beside products without VBMI is on the ports of what scales that are powers
/// take (MXFP4 from 32 rows on: 2 to 10 % more time on Zen 4).
const fn looks_up_in_tile<I: Isa, L: Codes, S: Scale>() -> bool {
    let nibbles = L::OPERANDS == 2 && L::STEP == LINE;
    I::LARGE && I::VNNI && nibbles && !L::NIBBLES && !words_of_type::<I, S>() && (I::VBMI || !S::POWERS)
}

/// From how many rows on nibbles are unpacked for [taller] tiles: what is unpacked comes from farther away, with no products beside it. The second: of
/// symmetric integers with one scale an output.
const UNPACKED_NIBBLES: [usize; 2] = [48, 24];

/// From how many rows on nibbles whose groups have zero points are unpacked, with these, where two products begin in a cycle: an addition more for each line is not
/// free there. Zen 5, from the cache, in the tile or before: g32 at 48 · 64 · 192 rows 204/210 · 280/273 · 826/777 us, g128 200/196 · 266/256 · 796/737.
const SHIFTED_ROWS: usize = 56;

/// The most rows for which FP8 codes are shifted in tiles where loads are as few as products: each of these products has one. Zen 5, from the cache, in the tile or before: 128x128 at
/// 13 · 16 · 24 · 64 rows 107/119 · 126/132 · 210/187 · 534/451 us, MXFP8 117/121 · 139/136 · 210/204 · 552/487.
const UNSHIFTED_ROWS: usize = 16;

/// Whether tiles of many rows are those of `words.rs`, as scales are words.
const fn words_of_type<I: Isa, S: Scale>() -> bool {
    I::LARGE && I::VNNI && !I::TILES && S::WORDS > 0
}

/// Rows of the largest tile with words.
fn word_rows<I: Isa>(isa: I) -> usize {
    WORD_ROWS[usize::from(isa.ports() != Ports::Own)]
}

/// BF16 numbers as F32.
#[inline(always)]
fn widen(from: &[u8], to: &mut [u8]) {
    for (to, from) in to.as_chunks_mut::<4>().0.iter_mut().zip(from.as_chunks::<2>().0) {
        *to = (u32::from(u16::from_le_bytes(*from)) << 16).to_le_bytes();
    }
}

/// How many tiles pass over cached lines, with rows that differ by one at most, and `most` of them at best: such that have too few rows are not
/// compiled, rather are there some more in others.
fn tiles<I: Isa>(rows: usize, most: usize) -> usize {
    let least = if I::LARGE { 4 } else { 3 };
    rows.div_ceil(most).min((rows / least).max(1))
}

impl<I: Isa, L: Codes, S: Scale, const XG: usize, const WG: usize> Path<I> for Ints<L, S, XG, WG> {
    type Lines = L;
    type Widened = Widened<Self>;
    type Words = InWords<Self>;
    const INTEGERS: bool = true;
    // Where inputs have a scale for a whole block, and weights none but that of the output.
    const ON_TILES: bool = XG == BLOCK && WG == 0;
    const STREAMS_ON_TILES: bool = I::TILES && <Self as Path<I>>::ON_TILES;
    const STREAMS_ANY_ROWS: bool = true;
    const TILE_PANELS: usize = MOST_PANELS;
    const IN_WORDS: bool = I::VNNI && !I::TILES && L::SPAN > 4 && WG == XG && S::ZEROS == S::SHIFTS;
    const LIGHT: bool = L::OPERANDS == 1;
    const GROUPED: bool = S::RECORD > 0;
    // Few rows have the same bits without a tile unit, so that code which has one leaves them out.
    const STREAM_ROWS: usize = match I::TILES {
        true => 0,
        // Tiles of many rows make operands of lines beside products, too.
        false if L::NIBBLES => stream_rows(I::LARGE),
        false => most_stream_rows(I::LARGE),
    };
    const ONE_STREAM: usize = one_stream::<L, S, XG, WG>();
    const SCALED_BLOCKS: usize = if S::SPAN > 1 { S::SPAN } else { scaled_blocks::<S>() };
    const WIDENED: usize = 1;
    const WORDS: [usize; 2] = if words_of_type::<I, S>() { [supers_bytes(S::FOLDS), 0] } else { [0; 2] };

    fn asks(_: I, _: bool) -> usize {
        match I::TILES || words_of_type::<I, S>() {
            true => 1,
            false => int_asks::<I, S, XG>(),
        }
    }

    fn cached_panels(isa: I, rows: usize) -> usize {
        if Self::is_square(isa, rows) { MOST_PANELS } else { cached_panels::<I>() }
    }

    fn rows(isa: I, rows: usize) -> usize {
        if words_of_type::<I, S>() {
            word_rows(isa)
        } else if S::WORDS > 0 && I::LARGE {
            5
        } else if !I::LARGE && L::SPAN == 0 && size_of::<I::Wide>() > LINE {
            // Magnitudes and signs of codes, two of the 16 registers each.
            4
        } else if taller(isa) && !const { Self::squares::<I>() } && WG <= XG && Self::has_operands(isa, rows) {
            // As many sums and totals go with two lines and an input into 32 registers, unless sums of several groups come in between.
            7
        } else {
            6
        }
    }

    fn unpacked(isa: I, rows: usize) -> bool {
        let least = UNPACKED_NIBBLES[usize::from(<Self as Path<I>>::ON_TILES)];
        let shifted = S::SHIFTS && XG < BLOCK && I::VNNI && rows >= SHIFTED_ROWS && isa.ports() == Ports::Double;
        let enough = rows >= least && taller(isa) || shifted;
        let beside_products =
            if L::NIBBLES { I::LARGE && !enough } else { looks_up_in_tile::<I, L, S>() && !taller(isa) };
        L::OPERANDS > 1 && !beside_products
    }

    fn unpack(isa: I, from: &[u8], scales: &mut Scales<'_>, to: &mut [u8]) {
        isa.run(Unpack::<L, S, XG, false> { from, scales, to, kind: PhantomData });
    }

    fn prepare(isa: I, layout: &Layout, panel: &[u8], blocks: Range<usize>, _: i32, [lines, words, _]: [&mut [u8]; 3]) {
        if const { words_of_type::<I, S>() } {
            let kind = PhantomData;
            if const { L::NIBBLES } && lines.is_empty() {
                isa.run(PrepareSupers::<L, S, XG, false> { layout, panel, blocks, lines, words, kind });
            } else {
                isa.run(PrepareSupers::<L, S, XG, true> { layout, panel, blocks, lines, words, kind });
            }
        }
    }

    fn stream(isa: I, r: usize, tile: Tile<'_>) {
        let kind = PhantomData;
        if const { I::LARGE && <Self as Path<I>>::ONE_STREAM > 0 } && alone::<I, Self>(isa, r) {
            return rows!(r, [2, 3], isa.run(IntTile::<L, S, XG, WG, true, R, 1> { tile, kind }));
        }
        stream_shapes!(I, Self, r, isa.run(IntTile::<L, S, XG, WG, true, R, P> { tile, kind }))
    }

    fn stream_on_tiles(isa: I, r: usize, tile: Tile<'_>) {
        if const { <Self as Path<I>>::STREAMS_ON_TILES } {
            isa.stream_ints_on_tiles::<L>(r, tile);
        } else {
            unreachable!("these do not stream");
        }
    }

    fn cached(isa: I, r: usize, unpacked: bool, tile: Tile<'_>) {
        if const { I::TILES } {
            unreachable!("any number of these rows streams");
        } else if const { words_of_type::<I, S>() } {
            let words = if S::FOLDS { words::Words::Folded } else { words::Words::OfType };
            isa.multiply_words(Kind { nibbles: !unpacked, group: XG, words }, r, tile);
        } else if const { I::LARGE && I::VNNI && <Self as Path<I>>::ON_TILES } && unpacked && taller(isa) {
            rows!(r, [4, 5, 6], isa.run(SquareTile::<S, R> { tile, kind: PhantomData }))
        } else if const { Self::squares::<I>() && !<Self as Path<I>>::ON_TILES } && unpacked && taller(isa) {
            let kind = PhantomData;
            rows!(r, [4, 5, 6], isa.run(IntTile::<Bytes<0>, S, XG, WG, false, R, { MOST_PANELS }> { tile, kind }))
        } else if const { I::LARGE && I::VNNI } && unpacked {
            // All codes are alike to VNNI.
            let kind = PhantomData;
            rows!(r, [4, 5, 6, 7], isa.run(IntTile::<Bytes<0>, S, XG, WG, false, R, 2> { tile, kind }))
        } else if const { I::LARGE && L::NIBBLES || looks_up_in_tile::<I, L, S>() } {
            let kind = PhantomData;
            rows!(r, [4, 5, 6], isa.run(IntTile::<L, S, XG, WG, false, R, 2> { tile, kind }))
        } else if const { I::LARGE } {
            let kind = PhantomData;
            rows!(r, [4, 5, 6], isa.run(IntTile::<L::Unpacked, S, XG, WG, false, R, 2> { tile, kind }))
        } else {
            let kind = PhantomData;
            rows!(r, [3, 4, 5, 6], isa.run(IntTile::<L::Unpacked, S, XG, WG, false, R, 1> { tile, kind }))
        }
    }
}

impl<I: Isa, L: Floats, const SCALED: u8> Path<I> for Numbers<L, SCALED> {
    type Lines = L;
    type Widened = Widened<Self>;
    type Words = Self;
    const INTEGERS: bool = false;
    const LIGHT: bool = L::OPERANDS == 1;
    const WIDENS: bool = widens::<I, L>();
    const GROUPED: bool = scaled::span(SCALED).1 > 0;
    const STREAM_ROWS: usize = match I::TILES || widens::<I, L>() {
        true => stream_rows(I::LARGE),
        false => most_stream_rows(I::LARGE),
    };
    const WIDENS_GROUPS: bool = SCALED == scaled::GROUPS;
    const STREAMS_ON_TILES: bool = I::TILES && L::BF16;
    const STREAMS_ANY_ROWS: bool = L::OPERANDS > 1;
    const ONE_STREAM: usize = 0;
    const SCALED_BLOCKS: usize = 1;
    // Lines that are operands are widened in the tile: layers of BF16 are 4 to 8 % slower at 32 rows else, and 2 % faster at 64.
    const WIDENED: usize = match L::BF16 && L::OPERANDS > 1 && I::LARGE && I::INPUT_BYTES > 2 {
        true if !I::TILES => 2,
        _ => 1,
    };

    fn asks(isa: I, unpacked: bool) -> usize {
        match L::BF16 && <Self as Path<I>>::WIDENED == 1 {
            _ if I::TILES => 1,
            _ if square(isa) => BLOCK / if const { widens::<I, L>() } { 2 } else { 1 } / STEP,
            true if shifts_in_tile::<I, L>() && !unpacked => scaled::asks::<I>(SCALED, BLOCK / 4),
            true => scaled::asks::<I>(SCALED, BLOCK / 2),
            false => scaled::asks::<I>(SCALED, BLOCK),
        }
    }

    fn cached_panels(isa: I, _: usize) -> usize {
        if square(isa) { MOST_PANELS } else { cached_panels::<I>() }
    }

    fn rows(isa: I, _: usize) -> usize {
        // Totals beside the sums, where scales come in between, may lie in memory.
        if I::TILES && L::BF16 {
            2 * TILE_ROWS
        } else if square(isa) {
            6
        } else if I::LARGE {
            if widens::<I, L>() { 8 } else { 12 }
        } else if L::BF16 {
            // One more, and sums of BF16 weights, which are widened, go to memory and back with every line.
            5
        } else {
            6
        }
    }

    fn unpacked(isa: I, rows: usize) -> bool {
        let enough = rows > UNSHIFTED_ROWS && isa.ports() == Ports::Double;
        let beside_products = shifts_in_tile::<I, L>() && !enough;
        L::OPERANDS * <Self as Path<I>>::WIDENED > 1 && !beside_products
    }

    fn unpack(isa: I, from: &[u8], scales: &mut Scales<'_>, to: &mut [u8]) {
        let kind = PhantomData;
        if const { <Self as Path<I>>::WIDENED > 1 } {
            isa.run(Unpack::<L, NoScale, BLOCK, true> { from, scales, to, kind });
        } else {
            isa.run(Unpack::<L, NoScale, BLOCK, false> { from, scales, to, kind });
        }
    }

    fn stream(isa: I, r: usize, tile: Tile<'_>) {
        let kind = PhantomData;
        stream_shapes!(I, Self, r, isa.run(FloatTile::<L, SCALED, true, R, P> { tile, kind }))
    }

    fn stream_on_tiles(isa: I, r: usize, tile: Tile<'_>) {
        if const { <Self as Path<I>>::STREAMS_ON_TILES && L::BUNDLE == MOST_PANELS } {
            isa.stream_on_tiles::<L, SCALED, MOST_PANELS>(r, tile);
        } else if const { <Self as Path<I>>::STREAMS_ON_TILES && L::BUNDLE == 1 } {
            isa.stream_on_tiles::<L, SCALED, 1>(r, tile);
        } else {
            unreachable!("these do not stream");
        }
    }

    fn cached(isa: I, r: usize, unpacked: bool, tile: Tile<'_>) {
        if const { I::TILES && L::BF16 } {
            if const { L::OPERANDS == 1 } {
                tiled::cached(isa, r, tile, false);
            } else {
                unreachable!("any number of these rows streams");
            }
        } else if const { I::LARGE && !I::TILES } && square(isa) {
            macro_rules! square {
                ($lines:ty) => {{
                    let kind = PhantomData;
                    rows!(r, [4, 5, 6], isa.run(FloatTile::<$lines, SCALED, false, R, { MOST_PANELS }> { tile, kind }))
                }};
            }
            if const { widens::<I, L>() } {
                square!(L)
            } else if const { <Self as Path<I>>::WIDENED > 1 } {
                square!(F32Lines)
            } else {
                square!(L::Unpacked)
            }
        } else if const { I::LARGE && widens::<I, L>() } {
            let kind = PhantomData;
            rows!(r, [4, 5, 6, 7, 8], isa.run(FloatTile::<L, SCALED, false, R, 2> { tile, kind }))
        } else if const { shifts_in_tile::<I, L>() } && !unpacked {
            let kind = PhantomData;
            rows!(r, [6, 7, 8, 9, 10, 11, 12], isa.run(FloatTile::<L, SCALED, false, R, 2> { tile, kind }))
        } else if const { I::LARGE && <Self as Path<I>>::WIDENED > 1 } {
            let kind = PhantomData;
            rows!(r, [6, 7, 8, 9, 10, 11, 12], isa.run(FloatTile::<F32Lines, SCALED, false, R, 2> { tile, kind }))
        } else if const { I::LARGE } {
            let kind = PhantomData;
            rows!(r, [6, 7, 8, 9, 10, 11, 12], isa.run(FloatTile::<L::Unpacked, SCALED, false, R, 2> { tile, kind }))
        } else {
            let kind = PhantomData;
            rows!(r, [3, 4, 5, 6], isa.run(FloatTile::<L::Unpacked, SCALED, false, R, 1> { tile, kind }))
        }
    }
}

/// Weights that a path has, as BF16 numbers times their scales but for those of outputs, for a tile unit.
pub struct Widened<K>(PhantomData<K>);

/// What all of these have in common.
macro_rules! widened {
    () => {
        type Lines = L;
        type Widened = Self;
        type Words = Self;
        const INTEGERS: bool = false;
        const LIGHT: bool = false;
        const GROUPED: bool = false;
        const STREAM_ROWS: usize = 0;
        const ONE_STREAM: usize = 0;
        const SCALED_BLOCKS: usize = 1;

        fn rows(_: I, _: usize) -> usize {
            2 * TILE_ROWS
        }

        fn unpacked(_: I, _: usize) -> bool {
            true
        }

        fn stream(_: I, _: usize, _: Tile<'_>) {
            unreachable!("these do not stream")
        }
    };
}

impl<I: Isa, L: Codes, S: Scale, const XG: usize, const WG: usize> Path<I> for Widened<Ints<L, S, XG, WG>> {
    widened!();
    // An operand has four columns, a line of BF16 two.
    const WIDENED: usize = 2;

    fn unpack(isa: I, from: &[u8], scales: &mut Scales<'_>, to: &mut [u8]) {
        isa.run(Widen::<L, S, XG, WG> { from, scales, to, kind: PhantomData });
    }

    fn cached(isa: I, r: usize, _: bool, tile: Tile<'_>) {
        tiled::cached(isa, r, tile, S::OUTPUTS);
    }
}

impl<I: Isa, L: Floats, const SCALED: u8> Path<I> for Widened<Numbers<L, SCALED>> {
    widened!();
    const WIDENED: usize = 1;

    fn unpack(isa: I, from: &[u8], scales: &mut Scales<'_>, to: &mut [u8]) {
        isa.run(WidenFloats::<L> { from, scales, to, kind: PhantomData });
    }

    fn cached(isa: I, r: usize, _: bool, tile: Tile<'_>) {
        tiled::cached(isa, r, tile, false);
    }
}

/// Integers of a path whose scales become words: see `words.rs`.
pub struct InWords<K>(PhantomData<K>);

impl<S: Scale, L: Codes, const XG: usize, const WG: usize> InWords<Ints<L, S, XG, WG>> {
    /// Whether tiles are [full](words::full). Those with registers of 512 bits have more than products to do with groups of 16, and four panels are for loads.
    fn full<I: Isa>(isa: I) -> bool {
        !I::LARGE || XG == 32 && taller(isa)
    }

    /// Whether lines are nibbles that are split beside products.
    fn packed<I: Isa>(isa: I) -> bool {
        L::NIBBLES && !S::SHIFTS && !Self::full(isa)
    }
}

impl<I: Isa, L: Codes, S: Scale, const XG: usize, const WG: usize> Path<I> for InWords<Ints<L, S, XG, WG>> {
    type Lines = L;
    type Widened = Self;
    type Words = Self;
    const INTEGERS: bool = true;
    const LIGHT: bool = false;
    const GROUPED: bool = true;
    const STREAM_ROWS: usize = 0;
    const ONE_STREAM: usize = 0;
    const SCALED_BLOCKS: usize = CHUNK_BLOCKS;
    const WIDENED: usize = 1;
    const WORDS: [usize; 2] = [chunk_bytes(XG, S::MINIMA), CHUNK_BLOCKS * scales_bytes(XG, S::MINIMA)];

    fn cached_panels(isa: I, _: usize) -> usize {
        if I::LARGE && Self::full(isa) { MOST_PANELS } else { cached_panels::<I>() }
    }

    fn rows(isa: I, _: usize) -> usize {
        if Self::full(isa) { words::full::ROWS } else { word_rows(isa) }
    }

    fn unpacked(isa: I, _: usize) -> bool {
        !Self::packed(isa)
    }

    fn unpack(_: I, _: &[u8], _: &mut Scales<'_>, _: &mut [u8]) {
        unreachable!("with words")
    }

    fn prepare(
        isa: I,
        layout: &Layout,
        panel: &[u8],
        blocks: Range<usize>,
        zero: i32,
        [lines, words, scales]: [&mut [u8]; 3],
    ) {
        macro_rules! prepare {
            ($unpack:literal) => {{
                let kind = PhantomData;
                let job = Prepare::<L, S, XG, WG, $unpack> { layout, panel, blocks, zero, lines, words, scales, kind };
                isa.run(job);
            }};
        }
        if const { L::NIBBLES && !S::SHIFTS } && Self::packed(isa) { prepare!(false) } else { prepare!(true) }
    }

    fn stream(_: I, _: usize, _: Tile<'_>) {
        unreachable!("these do not stream")
    }

    fn cached(isa: I, r: usize, _: bool, tile: Tile<'_>) {
        if !Self::full(isa) {
            let words = words::Words::Made { minima: S::MINIMA };
            return isa.multiply_words(Kind { nibbles: Self::packed(isa), group: XG, words }, r, tile);
        }
        // Codes of all formats are alike then.
        macro_rules! full {
            ($p:expr, $group:literal) => {
                if const { S::MINIMA } { full!($p, $group, true) } else { full!($p, $group, false) }
            };
            ($p:expr, $group:literal, $minima:literal) => {
                rows!(r, [1, 2, 3, 4, 5, 6], isa.run(words::full::FullTile::<R, { $p }, $group, $minima>(tile)))
            };
        }
        if const { I::LARGE } {
            full!(MOST_PANELS, 32)
        } else if const { XG == 32 } {
            full!(1, 32)
        } else {
            full!(1, 16)
        }
    }
}

/// One product: what [`kt_core::cpu::kernel::Kernel::product`] is given.
pub struct Product<'a> {
    /// Weights, and which of their outputs.
    pub outputs: Outputs<'a>,
    /// Input rows.
    pub inputs: Inputs<'a>,
    /// Which of them.
    pub rows: Range<usize>,
    /// Where the numbers go.
    pub out: &'a mut [f32],
    /// Memory for unpacked lines.
    pub scratch: &'a mut Scratch,
    /// What codes of integer weights are more than what they stand for, if groups do not say that: for products with BF16 inputs.
    pub zero: i32,
}

impl Job for Product<'_> {
    fn go<I: Isa>(self, isa: I) {
        let weights = self.outputs.of;
        let (int8, lookups, bf16, f32) = (isa.for_int8(), isa.for_lookups(), isa.for_bf16(), isa.for_f32());
        // Whether groups are whole blocks.
        let blocks = |group: Group| group.cols(BLOCK).is_multiple_of(BLOCK);
        // Whether blocks of the inputs are wide.
        const WIDE_SPAN: usize = WIDE / BLOCK;
        let wide = self.inputs.layout().columns() == WIDE;
        let in_words = matches!(self.inputs.layout(), InputLayout::Int8Words { .. });
        match weights.format() {
            Format::F32 => self.on::<_, Numbers<F32Lines, { scaled::NO }>>(f32, Layout::new),
            Format::F16 => self.on::<_, Numbers<F16Lines, { scaled::NO }>>(f32, Layout::new),
            Format::Bf16 => self.on::<_, Numbers<Bf16Lines, { scaled::NO }>>(bf16, Layout::new),
            Format::Fp8Channel => self.on::<_, Numbers<Fp8, { scaled::OUTPUTS }>>(bf16, Layout::new),
            Format::Fp8Block => self.on::<_, Numbers<Fp8, { scaled::TILES }>>(bf16, Layout::new),
            Format::Mxfp8 => self.on::<_, Numbers<Fp8, { scaled::GROUPS }>>(bf16, Layout::new),
            Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) if wide => {
                self.on::<_, Ints<Bytes<0>, NoScale<WIDE_SPAN>, BLOCK, 0>>(int8, Layout::new)
            }
            Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) => {
                self.on::<_, Ints<Bytes<0>, NoScale, BLOCK, 0>>(int8, Layout::new)
            }
            Format::Int8(g) | Format::Int8Offset(g) if blocks(g) => {
                self.on::<_, Ints<Bytes<0>, F16Scale<0>, CHUNK, BLOCK>>(int8, Layout::new)
            }
            Format::Int8(_) | Format::Int8Offset(_) => {
                self.on::<_, Ints<Bytes<0>, F16Scale<0>, CHUNK, CHUNK>>(int8, Layout::new)
            }
            Format::Int8Asym(Group::Row) => self.on::<_, Ints<Bytes<0>, F16Scale<2>, BLOCK, BLOCK>>(int8, Layout::new),
            Format::Int8Asym(g) if blocks(g) => {
                self.on::<_, Ints<Bytes<0>, F16Scale<2>, CHUNK, BLOCK>>(int8, Layout::new)
            }
            Format::Int8Asym(_) => self.on::<_, Ints<Bytes<0>, F16Scale<2>, CHUNK, CHUNK>>(int8, Layout::new),
            Format::Int4(Group::Row) if wide => {
                self.on::<_, Ints<Nibbles, NoScale<WIDE_SPAN>, BLOCK, 0>>(int8, Layout::new)
            }
            Format::Int4(Group::Row) => self.on::<_, Ints<Nibbles, NoScale, BLOCK, 0>>(int8, Layout::new),
            Format::Int4(g) if blocks(g) && !in_words => {
                self.on::<_, Ints<Nibbles, F16Scale<0>, CHUNK, BLOCK>>(int8, Layout::new)
            }
            Format::Int4(_) => self.on_or_in_words::<_, Ints<Nibbles, F16Scale<0>, CHUNK, CHUNK>>(int8, Layout::new),
            Format::Int4Asym(Group::Row) => self.on::<_, Ints<Nibbles, F16Scale<1>, BLOCK, BLOCK>>(int8, Layout::new),
            Format::Int4Asym(g) if blocks(g) && !in_words => {
                self.on::<_, Ints<Nibbles, F16Scale<1>, CHUNK, BLOCK>>(int8, Layout::new)
            }
            Format::Int4Asym(_) => {
                self.on_or_in_words::<_, Ints<Nibbles, F16Scale<1>, CHUNK, CHUNK>>(int8, Layout::new)
            }
            Format::Mxfp4 => self.on_or_in_words::<_, Ints<E2m1, E8m0Scale, CHUNK, CHUNK>>(lookups, Layout::new),
            Format::Nvfp4 => {
                self.on_or_in_words::<_, Ints<E2m1, E4m3Scale, { mx::NV_COLS }, { mx::NV_COLS }>>(lookups, Layout::new)
            }
            other => unreachable!("{other} was never accepted"),
        }
    }
}

impl Product<'_> {
    /// Does it by a number path; `layout` says how matrices are packed.
    pub fn on<I: Isa, K: Path<I>>(self, isa: I, layout: fn(Format, usize) -> Layout) {
        // Most integers are for a tile unit only as BF16 numbers: so the others are not compiled for one.
        #[allow(clippy::if_same_then_else)]
        if const { I::TILES && K::INTEGERS && !K::ON_TILES } {
            self.along::<I, K::Widened>(isa, layout);
        } else if const { I::TILES && K::WIDENS_GROUPS } && isa.widens() {
            self.along::<I, K::Widened>(isa, layout);
        } else {
            self.along::<I, K>(isa, layout);
        }
    }

    /// [`Product::on`], or, with inputs for that, [`Product::in_words`].
    pub fn on_or_in_words<I: Isa, K: Path<I>>(self, isa: I, layout: fn(Format, usize) -> Layout) {
        match self.inputs.layout() {
            InputLayout::Int8Words { .. } => self.in_words::<I, K>(isa, layout),
            _ => self.on::<I, K>(isa, layout),
        }
    }

    /// Does it with scales of weights that become words, as those of the inputs are ([`InputLayout::Int8Words`]): of integers with small codes and scales of 16 or
    /// 32 columns or several times as many.
    pub fn in_words<I: Isa, K: Path<I>>(self, isa: I, layout: fn(Format, usize) -> Layout) {
        if const { K::IN_WORDS } {
            self.along::<I, K::Words>(isa, layout);
        } else {
            unreachable!("inputs were never said to be in words");
        }
    }

    fn along<I: Isa, K: Path<I>>(self, isa: I, layout: fn(Format, usize) -> Layout) {
        let Outputs { of: weights, range, next, next_inputs } = self.outputs;
        assert_eq!(self.out.len(), self.rows.len() * range.len(), "output of another shape");
        assert!(range.start.is_multiple_of(MOST_PANELS * PANEL) && range.end <= weights.rows(), "outputs out of range");
        assert!(self.rows.end <= self.inputs.rows(), "rows out of range");
        if self.out.is_empty() {
            return;
        }
        let layout_of = |weights: &Weights| layout(weights.format(), weights.cols());
        let layout = layout_of(weights);
        // Tiles of integers read no bundle that was not unpacked, unless they stream.
        assert!(layout.bundle == K::Lines::BUNDLE);
        assert!(!K::INTEGERS || layout.bundle == 1 || K::unpacked(isa, self.rows.len()));
        let (stride, step) = (layout.stride(), layout.step());
        let packed = weights.bytes();
        let (n, width) = (self.rows.len(), range.len());
        assert!(packed.len() >= panels(weights.rows()) * layout.panel_bytes, "packed otherwise");
        let panel_at = |done: usize| layout.panel_at((range.start + done) / PANEL);
        // A panel from a line on.
        let from = |at: usize, line: usize| &packed[at + spread(line, step)..];
        // Where what comes after `done` outputs begins, of this product or of the next one, and how far apart its lines are.
        let following = |done: usize| match next {
            Some((weights, first)) if done >= width => {
                let layout = layout_of(weights);
                (weights.bytes().as_ptr().wrapping_add(layout.panel_at(first / PANEL)), layout.step())
            }
            _ => (packed.as_ptr().wrapping_add(panel_at(done)), step),
        };
        let (block_bytes, input_span) = (self.inputs.layout().block_bytes(), self.inputs.layout().columns() / BLOCK);
        assert!(K::SCALED_BLOCKS.is_multiple_of(input_span), "inputs of another path");
        let input_stride = self.inputs.rows() * block_bytes;
        let first_row = self.rows.start * block_bytes;
        let inputs = &self.inputs.bytes()[first_row..];
        let later = Later::default();
        let group = layout.group.unwrap_or(BLOCK);
        let zero = match self.inputs.layout() {
            InputLayout::Int8Words { zero, .. } => zero,
            _ => self.zero,
        };
        // Where the scales of groups begin for block `start`, and how many columns the first of them has left. Divisions: not for each panel.
        let scales_at = |start: usize| (layout.first_record(start), group - start * BLOCK % group);
        // A tile of some panels, the first of which is at `at`, from block `start` on, of all rows.
        let part = |at: usize, start: usize, blocks: usize, (group_at, group_left): (usize, usize)| Tile {
            weights: &[],
            weight_stride: stride,
            unit: layout.unit,
            line_skip: layout.head,
            panel: &packed[at..],
            panel_stride: stride,
            panel_step: step,
            outputs_at: layout.outputs_at,
            group_at,
            group,
            group_left,
            record_skip: layout.record_skip(),
            front: if K::INTEGERS { layout.groups_at } else { layout.blocks_at },
            supers_at: layout.supers_at,
            first_block: start,
            inputs: &inputs[start / input_span * input_stride..],
            input_stride,
            input_span,
            row_bytes: block_bytes,
            blocks,
            row_tiles: 1,
            out: &mut [],
            out_stride: width,
            width: 0,
            after: std::ptr::null(),
            ahead: Ahead::NONE,
            later: &later,
            sums: &mut [],
            last: start + blocks == layout.blocks,
        };
        // What of the next inputs is asked for beside so many panels.
        let part_of_next = |done: usize, panels: usize| {
            let part = |done: usize| next_inputs.len() * done.min(width) / width;
            &next_inputs[part(done)..part(done + panels * PANEL)]
        };
        let mut done = 0;
        let streams = const { K::STREAM_ROWS > 0 } && n <= isa.stream_rows(K::STREAM_ROWS);
        let on_tiles = !streams && (n <= TILE_ROWS || K::STREAMS_ANY_ROWS) && K::STREAMS_ON_TILES;
        let twice = !streams && !on_tiles && streams_twice::<I, K>(isa, n);
        if streams || on_tiles || twice {
            // Of many rows some at a time, as many each time.
            let passes = if on_tiles { n.div_ceil(STREAM_ROWS) } else { 1 + usize::from(twice) };
            // How often there is something to ask for beside the products of a bundle on tiles, with each step of each tile of rows.
            let passes_rows = (0..passes).map(|pass| n * (pass + 1) / passes - n * pass / passes);
            let row_tiles: usize = passes_rows.map(|rows| rows.div_ceil(TILE_ROWS)).sum();
            let times = row_tiles * layout.blocks * K::TILE_STEPS;
            // Integers are asked for as they are due, four panels by turns.
            let by_turns = on_tiles && !K::INTEGERS && n > IN_ORDER_ROWS;
            if on_tiles && !by_turns && n > TILE_ROWS {
                later.add(next_inputs.as_ptr(), next_inputs.len());
                later.spread(width.div_ceil(K::TILE_PANELS * PANEL) * times, Level::Second);
            } else if !by_turns {
                // A tile alone waits for memory as it is.
                later.add(next_inputs.as_ptr(), next_inputs.len().min(AT_ONCE));
                later.spread(1, Level::Second);
                later.ask();
            }
            let most = n.div_ceil(passes);
            let panels = if on_tiles { K::TILE_PANELS } else { K::stream_panels(isa, most) };
            let (lines_at, scales_at) = (layout.lines_at(0), scales_at(0));
            let ahead = if by_turns { Ahead::DUE } else { Ahead::of(most, panels, K::INTEGERS, layout.bundle) };
            let mut rows = (inputs, input_stride, block_bytes);
            let mut sums: &mut [u8] = &mut [];
            if on_tiles {
                sums = self.scratch.panel.get(stream_size(n.min(STREAM_ROWS)));
            } else if const { I::TILES } {
                // Of weights that are BF16 numbers, as no others stream there.
                assert!(self.inputs.layout() == InputLayout::Bf16);
                let widened = self.scratch.panel.get(layout.blocks * n * BLOCK * I::INPUT_BYTES);
                for (to, from) in widened.chunks_exact_mut(n * BLOCK * I::INPUT_BYTES).zip(inputs.chunks(input_stride))
                {
                    widen(&from[..n * block_bytes], to);
                }
                rows = (widened, n * BLOCK * I::INPUT_BYTES, BLOCK * I::INPUT_BYTES);
            }
            while done < width {
                let at = panel_at(done);
                if by_turns {
                    // The bundle that comes next, and part of the next inputs.
                    later.clear();
                    later.add(following(done + panels * PANEL).0, panels * layout.panel_bytes);
                    let part = part_of_next(done, panels);
                    later.add(part.as_ptr(), part.len());
                    later.spread_by_turns(times);
                }
                for pass in 0..passes {
                    let (first, end) = (n * pass / passes, n * (pass + 1) / passes);
                    let tile = Tile {
                        weights: from(at, lines_at),
                        after: if end < n { packed[at..].as_ptr() } else { following(done + panels * PANEL).0 },
                        ahead,
                        inputs: &rows.0[first * rows.2..],
                        input_stride: rows.1,
                        row_bytes: rows.2,
                        out: &mut self.out[first * width + done..],
                        width: (width - done).min(panels * PANEL),
                        sums: &mut *sums,
                        ..part(at, 0, layout.blocks, scales_at)
                    };
                    if on_tiles {
                        K::stream_on_tiles(isa, end - first, tile);
                    } else {
                        K::stream(isa, end - first, tile);
                    }
                }
                done += panels * PANEL;
            }
            return;
        }

        let unpack = K::unpacked(isa, n);
        let panels = K::cached_panels(isa, n);
        let operand_block = if unpack {
            layout.lines / K::Lines::STEP * K::Lines::OPERANDS * K::WIDENED * LINE
        } else {
            layout.head / layout.unit + layout.lines
        };
        // Parts of as many blocks each: a last one with few would have the same to begin and to end, and more to ask for with each block.
        let cached = match (I::TILES, K::WORDS[0] > 0) {
            (true, _) => PIECE,
            (false, true) => CACHED_WORDS,
            // The tile's panels are but half of the bundle, so that every other pair of lines, and of the cache's sets, is another's.
            (false, false) if panels < layout.bundle && !unpack => CACHED / 2,
            (false, false) => CACHED,
        };
        let most_blocks = (cached / (panels * operand_block)).clamp(1, layout.blocks);
        let most_blocks =
            layout.blocks.div_ceil(layout.blocks.div_ceil(most_blocks)).next_multiple_of(K::SCALED_BLOCKS);
        // Unpacked lines of a panel, then words, if scales become such.
        let unpacked_lines = if unpack { most_blocks * operand_block } else { 0 };
        let unpacked_stride = unpacked_lines + most_blocks.div_ceil(K::SCALED_BLOCKS) * K::WORDS[0];
        let sums = if I::TILES { SUMS_SIZE } else { 0 };
        let buffer = self.scratch.panel.get(sums + panels * unpacked_stride + K::WORDS[1]);
        let (sums, buffer) = buffer.split_at_mut(sums);
        let (buffer, f32_scales) = buffer.split_at_mut(panels * unpacked_stride);
        let tiles = if K::WORDS[0] > 0 { n.div_ceil(K::rows(isa, n)) } else { tiles::<I>(n, K::rows(isa, n)) };
        // `larger` of one row more, then the others.
        let (rows, larger) = (n / tiles, n % tiles);
        // Sums of a tile unit have a buffer.
        let together = |tiles: usize, rows: usize| if I::TILES { tiles.min(MOST_ROWS / rows) } else { tiles };
        while done < width {
            let at = panel_at(done);
            for start in (0..layout.blocks).step_by(most_blocks) {
                let blocks = most_blocks.min(layout.blocks - start);
                let scales = scales_at(start);
                if const { K::WORDS[0] > 0 } {
                    for p in 0..panels {
                        let to = &mut buffer[p * unpacked_stride..][..unpacked_stride];
                        let (lines, words) = to.split_at_mut(unpacked_lines);
                        let panel = packed.get(at + layout.panel_at(p)..).unwrap_or_default();
                        let to = [lines, words, &mut *f32_scales];
                        K::prepare(isa, &layout, panel, start..start + blocks, zero, to);
                    }
                } else if unpack {
                    for p in 0..panels {
                        let to = &mut buffer[p * unpacked_stride..][..blocks * operand_block];
                        let mut scales = Scales {
                            panel: packed.get(at + layout.panel_at(p)..).unwrap_or_default(),
                            step,
                            record: scales.0,
                            left: scales.1,
                            group,
                            above: 0,
                            small: 0,
                            zero: self.zero,
                        };
                        for (block, to) in (start..).zip(to.chunks_exact_mut(operand_block)) {
                            let lines = &from(at, layout.lines_at(block))[layout.panel_at(p)..];
                            scales.above = layout.supers_at + block * BLOCK / SUPER * layout.super_record;
                            if const { K::Lines::TOLD } {
                                let bits =
                                    scales.panel[spread(layout.supers_at + block * BITS, step)..].first_chunk::<BITS>();
                                scales.small = u32::from_le_bytes(*bits.expect("packed otherwise"));
                            }
                            K::unpack(isa, lines, &mut scales, to);
                            if (block + 1) & (layout.unit - 1) == 0 {
                                scales.record += layout.record_skip();
                            }
                        }
                    }
                }
                // What comes next: the next columns, or the first ones of the next panels, and part of the next inputs.
                let ((ahead, step_ahead), start_ahead) = match start + blocks {
                    next if next < layout.blocks => ((packed[at..].as_ptr(), step), next),
                    _ => (following(done + panels * PANEL), 0),
                };
                let blocks_ahead = most_blocks.min(layout.blocks - start_ahead);
                later.clear();
                let bytes = layout.bytes_of(start_ahead..start_ahead + blocks_ahead);
                for p in 0..panels {
                    let at = ahead.wrapping_add(layout.panel_at(p) + spread(bytes.start, step_ahead));
                    let bundle = layout.bundle;
                    if bundle == 1 || bundle * LINE != step_ahead || !panels.is_multiple_of(bundle) {
                        later.add_lines(at, bytes.len(), step_ahead);
                    } else if p % bundle == 0 {
                        // A whole bundle.
                        later.add(at, bundle * bytes.len());
                    }
                }
                if start == 0 {
                    let part = part_of_next(done, panels);
                    later.add(part.as_ptr(), part.len());
                }
                let asks = K::asks(isa, unpack || K::LIGHT);
                if I::TILES {
                    later.spread_by_turns(tiles * blocks * BLOCK_STEPS);
                } else {
                    later.spread(tiles * blocks * asks, Level::of(n, I::LARGE));
                }
                let mut first = 0;
                while first < n {
                    let (rows, row_tiles) = match larger * (rows + 1) {
                        end if first < end => (rows + 1, together((end - first) / (rows + 1), rows + 1)),
                        _ => (rows, together((n - first) / rows, rows)),
                    };
                    let mut part = part(at, start, blocks, scales);
                    if K::WORDS[0] > 0 {
                        (part.panel, part.panel_stride) = (&buffer[unpacked_lines..], unpacked_stride);
                    }
                    let tile = Tile {
                        weights: if unpack { &*buffer } else { from(at, layout.lines_at(start)) },
                        weight_stride: if unpack { unpacked_stride } else { stride },
                        line_skip: if unpack { 0 } else { part.line_skip },
                        inputs: &part.inputs[first * block_bytes..],
                        out: &mut self.out[first * width + done..],
                        width: (width - done).min(panels * PANEL),
                        row_tiles,
                        sums,
                        ..part
                    };
                    K::cached(isa, rows, unpack || K::LIGHT, tile);
                    first += rows * row_tiles;
                }
                debug_assert!(I::TILES || later.is_done(), "lines that are asked for {asks} times a block");
            }
            done += panels * PANEL;
        }
    }
}

impl Product<'_> {
    /// Does it with weights in place: their blocks are decoded into the cache, some columns of a panel or two at a time, and tiles of rows
    /// pass over them, but none of a tile unit. Inputs have a scale per [`Blocks::GROUP`] columns.
    pub fn decoded<I: Isa, B: Blocks, const G: usize>(self, isa: I) {
        let Outputs { of: weights, range, next, .. } = self.outputs;
        let matrix = weights.matrix().expect("weights in place");
        const { assert!(G == B::GROUP) };
        assert!(!I::TILES, "blocks in place are not for a tile unit");
        assert_eq!(self.out.len(), self.rows.len() * range.len(), "output of another shape");
        assert!(range.start.is_multiple_of(PANEL) && range.end <= matrix.rows(), "outputs out of range");
        assert!(self.rows.end <= self.inputs.rows() && matrix.cols().is_multiple_of(SUPER), "rows out of range");
        let (n, width) = (self.rows.len(), range.len());
        let block_bytes = self.inputs.layout().block_bytes();
        let input_stride = self.inputs.rows() * block_bytes;
        let inputs = &self.inputs.bytes()[self.rows.start * block_bytes..];
        // In units of `SUPER` columns.
        let columns = matrix.cols() / SUPER;
        let few = n <= stream_rows(I::LARGE);
        let direct = few && n <= DIRECT_ROWS;
        let panels = if few { 1 } else { <Ints<Bytes<0>, F32Scale, G, G> as Path<I>>::cached_panels(isa, n) };
        let cached = if few { FEW } else { CACHED };
        let most_columns = (cached / (panels * SUPER * PANEL)).clamp(1, columns.max(1));
        let line_bytes = most_columns * SUPER * PANEL;
        let record_bytes = most_columns * SUPER / G * F32Scale::RECORD;
        let stride = line_bytes + record_bytes;
        let buffer = self.scratch.panel.get(panels * stride);
        let tiles = if few { 1 } else { n.div_ceil(<Ints<Bytes<0>, F32Scale, G, G> as Path<I>>::rows(isa, n)) };
        let mut rows = [Row::EMPTY; PANEL];
        let (later, nothing) = (Later::default(), Later::default());
        let mut done = 0;
        while n > 0 && done < width {
            // The outputs that come next, all in one piece of memory, of which each step reads a bit here and there, so that the hardware
            // does not see what is wanted. They are asked for as outputs are decoded; with many rows, as tiles pass over those.
            let following = match next {
                _ if done + panels * PANEL < width => Some((matrix, range.start + done + panels * PANEL)),
                Some((weights, first)) => weights.matrix().map(|matrix| (matrix, first)),
                None => None,
            };
            later.clear();
            if let Some((matrix, first)) = following {
                later.add(matrix.row(first).as_ptr(), panels * PANEL * columns * B::BYTES);
            }
            let asks = <Ints<Bytes<0>, F32Scale, G, G> as Path<I>>::asks(isa, true);
            let times = if few { columns * panels * (PANEL / ASK) } else { tiles * columns * (SUPER / BLOCK) * asks };
            later.spread(times, if few { Level::Second } else { Level::First });
            if const { !I::TILES } && direct {
                let first = range.start + done;
                let outputs: [&[u8]; PANEL] =
                    std::array::from_fn(|o| if first + o < range.end { matrix.row(first + o) } else { &[] });
                let outputs = &outputs[..PANEL.min(range.end - first)];
                let (rows, later, out) = (&mut rows, &later, &mut self.out[done..]);
                macro_rules! run {
                    ($r:literal) => {
                        isa.run(Direct::<B, G, $r> {
                            outputs,
                            rows,
                            inputs,
                            input_stride,
                            out,
                            out_stride: width,
                            later,
                            kind: PhantomData,
                        })
                    };
                }
                match n {
                    1 => run!(1),
                    _ => run!(2),
                }
                done += PANEL;
                continue;
            }
            // Where fewer panels are left than a tile has, the others are what was there before.
            let present = (width - done).div_ceil(PANEL).min(panels);
            for start in (0..columns).step_by(most_columns) {
                let now = most_columns.min(columns - start);
                for p in 0..present {
                    let (lines, records) = buffer[p * stride..][..stride].split_at_mut(line_bytes);
                    let first = range.start + done + p * PANEL;
                    let lines = &mut lines[..now * SUPER * PANEL];
                    let mut outputs: [&[u8]; PANEL] = [&[]; PANEL];
                    let outputs = &mut outputs[..PANEL.min(range.end - first)];
                    for (o, output) in outputs.iter_mut().enumerate() {
                        *output = &matrix.row(first + o)[start * B::BYTES..][..now * B::BYTES];
                    }
                    let later = if few { &later } else { &nothing };
                    isa.run(Decode::<B> { outputs, rows: &mut rows, lines, records, later, kind: PhantomData });
                }
                for i in 0..tiles {
                    let rows = n * i / tiles..n * (i + 1) / tiles;
                    let first_block = start * SUPER / BLOCK;
                    let tile = Tile {
                        weights: &*buffer,
                        weight_stride: stride,
                        unit: 1,
                        line_skip: 0,
                        panel: &*buffer,
                        panel_stride: stride,
                        panel_step: LINE,
                        outputs_at: 0,
                        group_at: line_bytes,
                        group: G,
                        group_left: G,
                        record_skip: 0,
                        front: 0,
                        supers_at: 0,
                        first_block,
                        inputs: &inputs[first_block * input_stride + rows.start * block_bytes..],
                        input_stride,
                        input_span: 1,
                        row_bytes: block_bytes,
                        blocks: now * SUPER / BLOCK,
                        row_tiles: 1,
                        out: &mut self.out[rows.start * width + done..],
                        out_stride: width,
                        width: (width - done).min(panels * PANEL),
                        after: buffer.as_ptr(),
                        ahead: Ahead::of(n, 1, true, 1),
                        later: &later,
                        sums: &mut [],
                        last: start + now == columns,
                    };
                    if const { !I::TILES } && few {
                        Ints::<Bytes<0>, F32Scale, G, G>::stream(isa, rows.len(), tile);
                    } else {
                        Ints::<Bytes<0>, F32Scale, G, G>::cached(isa, rows.len(), true, tile);
                    }
                }
            }
            done += panels * PANEL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Avx2, Vnni};

    /// Every number of rows that does not stream is cut into tiles that are compiled.
    #[test]
    fn all_rows_have_tiles() {
        let check = |tiles: fn(usize, usize) -> usize, large: bool, most: usize, compiled: Range<usize>| {
            for n in stream_rows(large) + 1..2000 {
                let tiles = tiles(n, most);
                let rows = n / tiles..n.div_ceil(tiles) + 1;
                assert!(
                    compiled.start <= rows.start && rows.end <= compiled.end,
                    "{n} rows in {tiles} tiles of {rows:?}"
                );
            }
        };
        for most in [5, 6] {
            check(tiles::<Vnni>, true, most, 4..7);
        }
        check(tiles::<Vnni>, true, 7, 4..8);
        check(tiles::<Vnni>, true, 8, 4..9);
        check(tiles::<Vnni>, true, 12, 6..13);
        for most in [4, 5, 6] {
            check(tiles::<Avx2>, false, most, 3..7);
        }
        // With words, of which those that are made never stream.
        for most in WORD_ROWS {
            check(|n, most| n.div_ceil(most), true, most, 3..most + 1);
            assert!((1..=stream_rows(true)).all(|n| n.div_ceil(n.div_ceil(most)) <= most));
        }
    }
}
