//! Splits a batch over the banks of a layer: every (token, expert) exactly once. Never sees a weight.

use crate::batch::NO_EXPERT;
use crate::work::{ExpertRows, Row};

/// Where an expert lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home {
    /// Index of the bank.
    pub bank: u32,
    /// Index of the expert within the bank.
    pub local: u32,
}

/// One bank's share of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Share {
    /// (token, weight) pairs grouped by expert, by rising token within a group.
    pub rows: Vec<Row>,
    /// Groups by rising local expert, none empty.
    pub experts: Vec<ExpertRows>,
}

/// Splits `topk_ids: [tokens, top_k]` over banks. Ids were checked: each is [`NO_EXPERT`] or an index of `homes`.
pub fn split(topk_ids: &[i32], topk_weights: &[f32], top_k: usize, homes: &[Home], banks: usize) -> Vec<Share> {
    let mut shares = vec![Share::default(); banks];
    Splitter::default().split(topk_ids, topk_weights, top_k, homes, &mut shares);
    shares
}

/// [`split`] in memory that is kept from batch to batch.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    counts: Vec<usize>,
    order: Vec<usize>,
    next: Vec<usize>,
}

impl Splitter {
    /// Makes room for batches of `rows` choices among `experts`, and in their shares.
    pub fn reserve(&mut self, experts: usize, rows: usize, shares: &mut [Share]) {
        for list in [&mut self.counts, &mut self.order, &mut self.next] {
            list.clear();
            list.reserve(experts);
        }
        for share in shares {
            share.rows.clear();
            share.rows.reserve(rows);
            share.experts.clear();
            share.experts.reserve(experts.min(rows));
        }
    }

    /// As [`split`]; each bank's share takes the place of what is in `shares`.
    pub fn split(
        &mut self,
        topk_ids: &[i32],
        topk_weights: &[f32],
        top_k: usize,
        homes: &[Home],
        shares: &mut [Share],
    ) {
        let Splitter { counts, order, next } = self;
        for list in [&mut *counts, &mut *next] {
            list.clear();
            list.resize(homes.len(), 0);
        }
        for &id in topk_ids.iter().filter(|&&id| id != NO_EXPERT) {
            counts[id as usize] += 1;
        }
        order.clear();
        order.extend((0..homes.len()).filter(|&e| counts[e] > 0));
        // No two experts have one home; and a stable sort would allocate.
        order.sort_unstable_by_key(|&e| (homes[e].bank, homes[e].local));
        for share in &mut *shares {
            share.rows.clear();
            share.experts.clear();
        }
        for &e in &*order {
            let share = &mut shares[homes[e].bank as usize];
            let start = share.experts.last().map_or(0, |g| g.rows.end);
            share.experts.push(ExpertRows { local: homes[e].local, rows: start..start + counts[e] });
            next[e] = start;
        }
        for share in &mut *shares {
            let rows = share.experts.last().map_or(0, |g| g.rows.end);
            share.rows.resize(rows, Row { token: 0, weight: 0.0 });
        }
        for (i, (&id, &weight)) in topk_ids.iter().zip(topk_weights).enumerate() {
            if id != NO_EXPERT {
                let e = id as usize;
                shares[homes[e].bank as usize].rows[next[e]] = Row { token: (i / top_k) as u32, weight };
                next[e] += 1;
            }
        }
    }
}

/// Which slots of `topk_ids: [tokens, top_k]` wait for the next layer: of each token, those of least weight beyond `top_k - defer`; among
/// equals the later ones. Nothing is returned where none wait.
pub fn defer(topk_ids: &[i32], topk_weights: &[f32], top_k: usize, defer: usize) -> Vec<bool> {
    if defer == 0 {
        return Vec::new();
    }
    let keep = top_k.saturating_sub(defer);
    let mut waits = vec![false; topk_ids.len()];
    let mut slots: Vec<usize> = Vec::with_capacity(top_k);
    for first in (0..topk_ids.len()).step_by(top_k.max(1)) {
        slots.clear();
        slots.extend((first..topk_ids.len().min(first + top_k)).filter(|&s| topk_ids[s] != NO_EXPERT));
        slots.sort_by(|&a, &b| topk_weights[b].total_cmp(&topk_weights[a])); // stable
        slots.iter().skip(keep).for_each(|&s| waits[s] = true);
    }
    waits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_weights_wait() {
        let ids = [3, 1, 2, 0, -1, 5, -1, 4, 6, 7, 8, 9];
        let weights = [0.1, 0.4, 0.1, 0.4, 9.0, 0.3, 9.0, 0.2, 0.25, 0.25, 0.25, 0.25];
        let waiting = |d| -> Vec<usize> {
            defer(&ids, &weights, 4, d).iter().enumerate().filter(|(_, w)| **w).map(|(i, _)| i).collect()
        };
        assert!(defer(&ids, &weights, 4, 0).is_empty());
        assert_eq!(waiting(1), [2, 11]); // the second token has two experts: both are among the three that stay
        assert_eq!(waiting(3), [0, 2, 3, 7, 9, 10, 11]);
        assert_eq!(waiting(4), [0, 1, 2, 3, 5, 7, 8, 9, 10, 11]);
        assert_eq!(waiting(9), waiting(4));
        // A token's choice is the same alone.
        assert_eq!(defer(&ids[4..8], &weights[4..8], 4, 3), defer(&ids, &weights, 4, 3)[4..8]);
        assert!(defer(&[], &[], 0, 1).is_empty());
    }

    /// Deterministic random numbers for the property test.
    fn random(seed: &mut u64) -> usize {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*seed >> 33) as usize
    }

    #[test]
    fn every_token_and_expert_exactly_once() {
        let mut seed = 1;
        for case in 0..500 {
            let experts = 1 + random(&mut seed) % 40;
            let banks = 1 + random(&mut seed) % 4;
            let (tokens, top_k) = (random(&mut seed) % 20, 1 + random(&mut seed) % 6);
            let mut sizes = vec![0u32; banks];
            let homes: Vec<Home> = (0..experts)
                .map(|_| {
                    let bank = random(&mut seed) % banks;
                    sizes[bank] += 1;
                    Home { bank: bank as u32, local: sizes[bank] - 1 }
                })
                .collect();
            let n = tokens * top_k;
            let ids: Vec<i32> = (0..n).map(|_| (random(&mut seed) % (experts + 1)) as i32 - 1).collect();
            let weights: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let shares = split(&ids, &weights, top_k, &homes, banks);
            assert_eq!(shares.len(), banks);
            let mut seen = vec![0; n];
            for (b, share) in shares.iter().enumerate() {
                let mut end = 0;
                for pair in share.experts.windows(2) {
                    assert!(pair[0].local < pair[1].local);
                }
                for group in &share.experts {
                    assert!(group.rows.start == end && !group.rows.is_empty());
                    end = group.rows.end;
                    let rows = &share.rows[group.rows.clone()];
                    assert!(rows.windows(2).all(|w| w[0].token <= w[1].token));
                    for row in rows {
                        let slot = row.weight as usize; // the weight is the slot's number
                        seen[slot] += 1;
                        assert_eq!(row.token as usize, slot / top_k);
                        let home = homes[ids[slot] as usize];
                        assert_eq!((home.bank as usize, home.local), (b, group.local));
                    }
                }
                assert_eq!(end, share.rows.len());
            }
            for (slot, &count) in seen.iter().enumerate() {
                assert_eq!(count, usize::from(ids[slot] != NO_EXPERT), "case {case}");
            }
        }
    }
}
